"""`flashnorm center FOLDER [OUT]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

from flashnorm.cli.options import AsJson, Quiet, TrustRemoteCode, counted, print_json, say
from flashnorm.errors import CheckFailed
from flashnorm.folders import require_folder

# Of two fp64 runs that differ in the order of operations alone. A mean that is left in lies far above.
TOLERANCE = 1e-10


def command(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder; it is only read.")],
    out: Annotated[
        Path | None, typer.Argument(help="A new folder for the centered checkpoint; it must not exist.")
    ] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give a tied head its own weight, so that the embedding can be centered.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(min=2, help="How many tokens each of the two rows has that are compared.")
    ] = 32,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Turn LayerNorms into RMSNorms, in memory, compare the fp64 outputs before and after, and write OUT if given."""
    require_folder(folder)
    if not quiet:
        say("center", f"opening {folder}")
    import torch
    from transformers.utils import logging

    from flashnorm.checkpoint.center import center_checkpoint
    from flashnorm.checkpoint.load import load
    from flashnorm.checkpoint.source import open_source
    from flashnorm.checkpoint.staging import check_output
    from flashnorm.cli.fold import by_reason
    from flashnorm.passes.center import center
    from flashnorm.sites.inputs import token_ids

    logging.disable_progress_bar()
    if out is not None:  # before the work, what would be refused after it
        check_output(open_source(folder).folder, out)
    model = load(folder, trust_remote_code=trust_remote_code, dtype=torch.float64)
    ids = token_ids(model, tokens, seed=1)
    before = _exact_outputs(model, ids)
    if not quiet:
        say("center", "tracing the model and centering weights")
    report = center(model, untie=untie)
    after = _exact_outputs(model, ids)
    error = float((after - before).norm() / before.norm())
    passed = error <= TOLERANCE
    if passed and out is not None:
        del model
        center_checkpoint(folder, out, untie=untie, trust_remote_code=trust_remote_code)
    written = str(out) if passed and out is not None else None
    if as_json:
        table = {
            "centered": report.centered,
            "keeps_bias": report.keeps_bias,
            "skipped": report.skipped,
            "untied": report.untied,
        }
        print_json({"folder": str(folder), **table, "error": error, "passed": passed, "out": written})
    else:
        typer.echo(
            f"{counted(len(report.centered), 'LayerNorm')} turned into RMSNorms, {len(report.keeps_bias)} of them with "
            f"a bias, {counted(len(report.skipped), 'norm')} left alone"
        )
        for line in by_reason(report.skipped):
            typer.echo(f"left alone: {line}")
        typer.echo(f"relative error of the fp64 outputs at {counted(ids.numel(), 'position')}: {error:.1e}")
        if written:
            typer.echo(f"wrote {written}")
    if not passed:
        raise CheckFailed(f"the outputs of {folder} moved by {error:.1e}, more than {TOLERANCE:.0e}")


def _exact_outputs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The fp64 logits of `ids`; the last hidden states, where a model has no head."""
    import torch

    from flashnorm.verify.oracle import everything_in, exact_logits

    if model.get_output_embeddings() is not None:
        return exact_logits(model, ids, torch.float64)
    with everything_in(torch.float64), torch.inference_mode():
        hidden: torch.Tensor = model(input_ids=ids).last_hidden_state
    return hidden
