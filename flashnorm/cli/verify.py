"""`flashnorm verify SRC DST` and `flashnorm verify --hashes FOLDER`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Dtype, Quiet, TrustRemoteCode, console, counted, print_json, say
from flashnorm.errors import CheckFailed, Refusal
from flashnorm.folders import require_folder


def command(
    src: Annotated[Path | None, typer.Argument(help="The checkpoint folder to compare with.")] = None,
    dst: Annotated[Path | None, typer.Argument(help="The folded checkpoint folder.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 file: samples come from it, and perplexity needs it.")
    ] = None,
    positions: Annotated[
        int,
        typer.Option(help="At how many positions logits are compared; 64 with --new-tokens 0 is several times faster."),
    ] = 256,
    tokens: Annotated[int, typer.Option(help="Over how many tokens of the text perplexity is taken.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="How far each greedy continuation goes; 0: none.")] = 64,
    dtype: Annotated[Dtype | None, typer.Option(help="Run both in this dtype, not the stored one.")] = None,
    hashes: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only recheck a folded folder's files against its manifest."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check that a folded checkpoint computes what its source computes, up to rounding."""
    if hashes is not None:
        if src is not None:
            raise Refusal("--hashes takes one folder; leave out SRC and DST")
        _recheck_hashes(hashes, as_json, quiet)
        return
    if src is None or dst is None:
        raise Refusal("verify takes the source and the folded folder: flashnorm verify SRC DST")
    require_folder(src)
    require_folder(dst)
    sample = _read(text) if text else None
    if not quiet:
        say("verify", f"opening {src}")
    import torch
    from transformers.utils import logging

    from flashnorm.verify.battery import verify
    from flashnorm.verify.render import report_tables

    logging.disable_progress_bar()  # one bar for each load would bury the lines of ours
    report = verify(
        src,
        dst,
        text=sample,
        positions=positions,
        tokens=tokens,
        new_tokens=new_tokens,
        dtype=getattr(torch, dtype.value) if dtype else None,
        trust_remote_code=trust_remote_code,
        progress=None if quiet else partial(say, "verify"),
        quiet=quiet,
    )
    if as_json:
        print_json(report.to_dict())
    else:
        console().print(report_tables(report))
    if not report.passed:
        raise CheckFailed(f"{dst} is not {src} folded: {report.verdict}")
    if not as_json:
        typer.echo(report.verdict)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8 text ({error}); convert it, or give another text") from error
    except OSError as error:
        raise Refusal(
            f"{path} cannot be read: {error.strerror or error}; give --text the path of a text file"
        ) from error


def _recheck_hashes(folder: Path, as_json: bool, quiet: bool) -> None:
    from flashnorm.checkpoint.hashes import verify_hashes

    report = verify_hashes(folder, quiet=quiet)
    if as_json:
        print_json({"passed": report.passed, **asdict(report)})
    else:
        for kind in ("changed", "missing", "extra"):
            for name in getattr(report, kind):
                typer.echo(f"{kind}: {name}")
        typer.echo(f"{counted(len(report.unchanged), 'file')} unchanged")
    if not report.passed:
        raise CheckFailed(
            f"{folder} is not as it was written: {counted(len(report.changed), 'file')} changed, "
            f"{len(report.missing)} missing, {len(report.extra)} extra"
        )
