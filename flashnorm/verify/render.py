"""The report as tables, and the verdict as a line."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashnorm.verify.greedy import Difference, GreedyPair
from flashnorm.verify.report import Check, VerifyReport
from flashnorm.verify.tasks import TaskPair, shown


def report_tables(report: VerifyReport) -> RenderableType:
    """Figures of both models, the continuations side by side, the checks with their bounds, and the notes."""
    dtypes = f"run in {report.dtype}, text in {report.text_dtype}, oracle in {report.oracle_dtype}"
    parts: list[RenderableType] = [Text(f"{dtypes}; samples: {report.samples}"), _figures(report)]
    if report.greedy:
        parts.append(_continuations(report.greedy))
    if report.tasks:
        parts.append(_tasks(report.tasks))
    parts.append(_checks(report.checks))
    parts += [Text(f"note: {note}") for note in report.notes]
    return Group(*parts)


def _figures(report: VerifyReport) -> Table:
    table = Table()
    table.add_column("figure")
    table.add_column("reference", justify="right")
    table.add_column("candidate", justify="right")
    logits, perplexity = report.logits, report.perplexity
    if logits is not None:
        rows = (
            ("relative error of the logits", logits.reference_relative_error, logits.candidate_relative_error),
            ("KL divergence from the oracle, mean", logits.reference_kl_mean, logits.candidate_kl_mean),
            ("KL divergence from the oracle, largest", logits.reference_kl_max, logits.candidate_kl_max),
        )
        for name, ours, theirs in rows:
            table.add_row(name, f"{ours:.3e}", f"{theirs:.3e}")
        table.add_row("relative error, weights alone", "0", f"{logits.exact_relative_error:.3e}")
        table.add_row(
            f"top-1 agreement with the oracle, {logits.positions} positions",
            f"{logits.reference_top1_agreement:.2%}",
            f"{logits.candidate_top1_agreement:.2%}",
        )
        table.add_row("top-1 agreement with the reference", "", f"{logits.mutual_top1_agreement:.2%}")
    if perplexity is not None:
        table.add_row(
            f"perplexity, {perplexity.tokens} tokens",
            f"{perplexity.reference:.4f}",
            f"{perplexity.candidate:.4f} ({perplexity.relative_difference:+.4%})",
        )
    return table


def _continuations(pairs: tuple[GreedyPair, ...]) -> Table:
    table = Table(title="greedy continuation", title_justify="left", show_lines=True)
    for column in ("prompt", "reference", "candidate"):
        table.add_column(column, overflow="fold")
    for pair in pairs:
        same = f"(the same {pair.tokens} tokens)"
        candidate = f"{pair.candidate}\n{_parting(pair.difference)}" if pair.difference else same
        table.add_row(Text(pair.prompt), Text(pair.reference), Text(candidate))
    return table


def _tasks(pairs: tuple[TaskPair, ...]) -> Table:
    table = Table(title="tasks, with standard errors", title_justify="left")
    table.add_column("task")
    table.add_column("metric")
    table.add_column("reference", justify="right")
    table.add_column("candidate", justify="right")
    for pair in pairs:
        ours, theirs = shown(pair.reference, pair.reference_error), shown(pair.candidate, pair.candidate_error)
        table.add_row(Text(pair.task), Text(pair.metric), ours, theirs)
    return table


def _parting(difference: Difference) -> str:
    return (
        f"(differs from token {difference.position}: there {difference.reference_text!r} is ahead by "
        f"{difference.reference_margin:.3g}, here {difference.candidate_text!r} by {difference.candidate_margin:.3g})"
    )


def _checks(checks: tuple[Check, ...]) -> Table:
    table = Table(title="checks", title_justify="left")
    table.add_column("check")
    table.add_column("figure", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for check in checks:
        table.add_row(check.name, f"{check.value:.4g}", f"{check.bound:.4g}", "passed" if check.passed else "FAILED")
    return table
