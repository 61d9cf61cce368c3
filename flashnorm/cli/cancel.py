"""`flashnorm cancel FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Quiet, TrustRemoteCode, counted, print_json, say
from flashnorm.errors import CheckFailed
from flashnorm.folders import require_folder

# Of two fp64 runs that differ in the order of operations alone. A wrong scalar or epsilon lies far above.
TOLERANCE = 1e-10


def command(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder; it is only read.")],
    tokens: Annotated[
        int, typer.Option(min=2, help="How many tokens each of the two rows has that are compared.")
    ] = 32,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Drop the norms that a later norm makes redundant, in memory, and compare the fp64 logits before and after."""
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
    report = cancel(model)
    after = exact_logits(model, ids, torch.float64)
    error = float((after - before).norm() / before.norm())
    if as_json:
        table = {"full": report.full, "partial": report.partial, "skipped": report.skipped}
        print_json({"folder": str(folder), **table, "error": error, "passed": error <= TOLERANCE})
    else:
        typer.echo(
            f"{counted(len(report.full), 'norm')} dropped, {len(report.partial)} more for a part of the readers, "
            f"{len(report.skipped)} left alone"
        )
        typer.echo(f"relative error of the fp64 logits at {counted(ids.numel(), 'position')}: {error:.1e}")
    if not error <= TOLERANCE:
        raise CheckFailed(f"the logits of {folder} moved by {error:.1e}, more than {TOLERANCE:.0e}")
