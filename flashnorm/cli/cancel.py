"""`flashnorm cancel FOLDER`."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import nn

from flashnorm.cli.options import AsJson, Quiet, TrustRemoteCode, counted, print_json, say
from flashnorm.errors import CheckFailed, Refusal
from flashnorm.folders import require_folder

# Of two fp64 runs that differ in the order of operations alone. A wrong scalar or epsilon lies far above.
TOLERANCE = 1e-10
_WINDOWS, _WINDOW = 8, 512  # of the calibration text, and tokens in each


def command(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder; it is only read.")],
    tokens: Annotated[
        int, typer.Option(min=2, help="How many tokens each of the two rows has that are compared.")
    ] = 32,
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate", help="Leave later norms their own epsilon where --text shows that little is lost."
        ),
    ] = False,
    limit: Annotated[
        float, typer.Option(min=0, help="With --approximate: how far a norm's output may be off, relatively.")
    ] = 1e-3,
    text: Annotated[
        Path | None, typer.Option(help="With --approximate: a UTF-8 text from which the bounds are derived.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Drop the norms that a later norm makes redundant, in memory, and compare the fp64 logits before and after."""
    if approximate != (text is not None):
        raise Refusal("--approximate takes its bounds from a text: give both --approximate and --text, or neither")
    require_folder(folder)
    if not quiet:
        say("cancel", f"opening {folder}")
    import torch
    from transformers.utils import logging

    from flashnorm.checkpoint.load import load
    from flashnorm.passes.cancel import cancel
    from flashnorm.sites.inputs import token_ids
    from flashnorm.verify.oracle import exact_logits

    logging.disable_progress_bar()
    model = load(folder, trust_remote_code=trust_remote_code, dtype=torch.float64)
    ids = token_ids(model, tokens, seed=1)
    before = exact_logits(model, ids, torch.float64)
    if not quiet:
        say("cancel", "tracing the model and dropping norms")
    windows = _windows(folder, text, model, trust_remote_code) if text is not None else []
    report = cancel(model, approximate=limit if approximate else None, calibration=windows)
    after = exact_logits(model, ids, torch.float64)
    error = float((after - before).norm() / before.norm())
    passed = math.isfinite(error) if report.approximate else error <= TOLERANCE
    if as_json:
        table: dict[str, Any] = {"full": report.full, "partial": report.partial, "skipped": report.skipped}
        if approximate:
            bounds = {norm: asdict(bound) for norm, bound in report.bounds.items()}
            table |= {"limit": limit, "approximate": report.approximate, "bounds": bounds}
        print_json({"folder": str(folder), **table, "error": error, "passed": passed})
    else:
        typer.echo(
            f"{counted(len(report.full), 'norm')} dropped, {len(report.partial)} more for a part of the readers, "
            f"{len(report.skipped)} left alone"
        )
        for norm, found in report.bounds.items():
            how = "its own epsilon" if norm in report.approximate else "kept exact"
            typer.echo(f"{norm}: off by at most {found.bound:.1e}, {how}")
        typer.echo(f"relative error of the fp64 logits at {counted(ids.numel(), 'position')}: {error:.1e}")
    if not passed:
        raise CheckFailed(f"the logits of {folder} moved by {error:.1e}, more than {TOLERANCE:.0e}")


def _windows(folder: Path, text: Path, model: nn.Module, trust_remote_code: bool) -> list[dict[str, Any]]:
    """The beginning of a text, as calls of the model. Raises `Refusal` where it cannot be read or is too short."""
    from flashnorm.verify.subject import tokenizer_of

    try:
        sample = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{text} cannot be read as UTF-8 text: {error}") from error
    tokenizer = tokenizer_of(folder, trust_remote_code)
    if tokenizer is None:
        raise Refusal(f"{folder} has no tokenizer, so it cannot read the text; copy the model's tokenizer files there")
    ids = tokenizer(sample[: _WINDOWS * _WINDOW * 8], return_tensors="pt")["input_ids"][0]
    config: Any = model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or _WINDOW
    windows = ids.split(min(_WINDOW, positions))[:_WINDOWS]
    if not len(ids) or len(windows[0]) < 2:
        raise Refusal(f"{text} has no two tokens; give a longer text")
    return [{"input_ids": window[None]} for window in windows if len(window) > 1]
