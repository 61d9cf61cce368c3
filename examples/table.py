"""The demo's result as one table, the continuations side by side, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 110


def show(result: dict[str, Any], folded: Path, console: Console | None = None) -> None:
    """Print what `examples.demo` found."""
    # A pipe has no width of its own; a terminal's is respected.
    console = console or Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    verify = result["verify"]
    console.print(_figures(result))
    console.print(_continuations(verify))
    for norm, reason in result["skipped"].items():
        console.print(f"Left alone: {norm}: {reason}")
    for check in verify["checks"]:
        if not check["passed"]:
            console.print(f"FAILED: {check['name']}: {check['value']} exceeds {check['bound']}: {check['meaning']}")
    console.print(f"The same model: {'yes' if verify['passed'] else 'NO'} ({len(verify['checks'])} checks).")
    console.print(f"The folded checkpoint: {folded}", soft_wrap=True)
    console.print(f'Load it: AutoModelForCausalLM.from_pretrained("{folded}")', soft_wrap=True)


def _figures(result: dict[str, Any]) -> Table:
    verify = result["verify"]
    logits, perplexity = verify["logits"], verify["perplexity"]
    table = Table(title="SmolLM2-135M-Instruct, bf16", title_justify="left")
    table.add_column("what")
    table.add_column("source", justify="right")
    table.add_column("folded", justify="right")
    table.add_row("norms whose gain is not one", str(result["norms"]), str(len(result["skipped"])))
    if logits is not None:
        table.add_row(
            f"logits, relative error (oracle: {verify['oracle_dtype']})",
            f"{logits['reference_relative_error']:.3%}",
            f"{logits['candidate_relative_error']:.3%}",
        )
        table.add_row("drift of the logits, ratio", "1", f"{logits['drift_ratio']:.3f}")
        table.add_row(
            "KL divergence from the oracle, nats",
            f"{logits['reference_kl_mean']:.2e}",
            f"{logits['candidate_kl_mean']:.2e}",
        )
        table.add_row(
            f"same most likely token as the oracle, of {logits['positions']}",
            f"{logits['reference_top1_agreement']:.1%}",
            f"{logits['candidate_top1_agreement']:.1%}",
        )
    if perplexity is not None:
        table.add_row(
            f"perplexity on {perplexity['tokens']:,} tokens of speeches",
            f"{perplexity['reference']:.4f}",
            f"{perplexity['candidate']:.4f} ({perplexity['relative_difference']:+.4%})",
        )
    return table


def _continuations(verify: dict[str, Any]) -> Table:
    table = Table(title="Greedy continuations", title_justify="left", show_lines=True)
    for column in ("prompt", "source", "folded"):
        table.add_column(column, overflow="fold")
    for pair in verify["greedy"]:
        difference = pair["difference"]
        same = f"(the same {pair['tokens']} tokens)"
        folded = same if difference is None else f"{pair['candidate']}\n\n{_parting(difference, verify['passed'])}"
        table.add_row(pair["prompt"], pair["reference"], folded)
    return table


def _parting(difference: dict[str, Any], explained: bool) -> str:
    kind = " at a near tie" if explained else ""
    return (
        f"(parts{kind} at token {difference['position']}: the source prefers its own by "
        f"{difference['reference_margin']:.3f}, the folded model by {difference['candidate_margin']:.3f})"
    )
