"""The demo's result: what was folded, the verification as `flashnorm verify` shows it, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from flashnorm.verify.render import report_tables
from flashnorm.verify.report import VerifyReport

WIDTH = 110


def show(result: dict[str, Any], folded: Path, console: Console | None = None) -> None:
    """Print what `examples.demo` found."""
    # A pipe has no width of its own; a terminal's is respected.
    console = console or Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    report = VerifyReport.from_dict(result["verify"])

    def say(line: str, **options: Any) -> None:
        console.print(line, markup=False, **options)  # reasons and generated text are full of brackets

    say(f"SmolLM2-135M-Instruct: {result['norms']} norms with a gain, {len(result['folded'])} folded")
    for norm, reason in result["skipped"].items():
        say(f"Left alone: {norm}: {reason}")
    console.print(report_tables(report))
    say(f"The same model: {'yes' if report.passed else 'NO'}; {report.verdict}")
    say(f"The folded checkpoint: {folded}", soft_wrap=True)
    say(f'Load it: AutoModelForCausalLM.from_pretrained("{folded}")', soft_wrap=True)
