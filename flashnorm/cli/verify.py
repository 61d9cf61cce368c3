"""`flashnorm verify SRC DST`, `--model DIR`, `--endpoint URL` and `--hashes FOLDER`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashnorm.cli import battery as run_battery
from flashnorm.cli.options import AsJson, Dtype, Quiet, TrustRemoteCode, console, counted, device_named, print_json, say
from flashnorm.errors import CheckFailed, Refusal
from flashnorm.folders import require_folder
from flashnorm.verify.levels import Level

if TYPE_CHECKING:
    import torch

    from flashnorm.verify.outcome import BatteryReport


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
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Run the battery on one checkpoint (with --endpoint: the model's name there)."
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Check a completions server; --model NAME says which model."),
    ] = None,
    accelerated: Annotated[bool, typer.Option(help="With --model: run it as flashnorm.accelerate does.")] = False,
    device: Annotated[
        str | None, typer.Option(help="With --model: cpu, cuda or cuda:1; default: the first GPU, else the CPU.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What the model should compute, or an endpoint's checkpoint.")
    ] = None,
    level: Annotated[Level, typer.Option(help="How much the battery looks at.")] = Level.standard,
    only: Annotated[
        str | None, typer.Option(metavar="CHECKS", help="Only these checks, such as lag,causality.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Also run these tasks of the lm-eval harness, such as arc_easy.")
    ] = None,
    download: Annotated[bool, typer.Option(help="With --tasks: let the harness download its data sets.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the battery as JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the battery as one HTML page.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check that a folded checkpoint computes what its source computes, or run the battery on one model."""
    if download and tasks is None:
        raise Refusal("--download belongs to --tasks, whose data sets it lets the harness fetch")
    if tasks is not None and (endpoint is not None or hashes is not None):
        raise Refusal("--tasks needs a model that is loaded here; give --model DIR, or SRC and DST")
    if endpoint is not None:
        _check_endpoint(endpoint, model, reference, level, only, quiet, as_json, junit, html)
        return
    if model is not None:
        if src is not None or hashes is not None:
            raise Refusal("--model takes one checkpoint; leave out SRC, DST and --hashes")
        for folder in (Path(model), reference):
            if folder is not None:
                require_folder(folder)
        sample = _read(text) if text else None

        def make() -> BatteryReport:
            from transformers.utils import logging

            from flashnorm.verify.suite import battery

            logging.disable_progress_bar()
            return battery(
                model,
                level=level.value,
                only=run_battery.names(only),
                accelerated=accelerated,
                reference=reference,
                text=sample,
                tasks=run_battery.names(tasks),
                download=download,
                dtype=_torch_dtype(dtype),
                device=device_named(device),
                trust_remote_code=trust_remote_code,
                progress=None if quiet else partial(say, "verify"),
            )

        run_battery.run(make, as_json=as_json, junit=junit, html=html)
        return
    if accelerated or reference or device or only or junit or html:
        raise Refusal(
            "--accelerated, --reference, --device, --only, --junit and --html belong to the battery; give --model DIR"
        )
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
        tasks=run_battery.names(tasks),
        download=download,
        dtype=_torch_dtype(dtype),
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


def _check_endpoint(
    url: str,
    model: str | None,
    reference: Path | None,
    level: Level,
    only: str | None,
    quiet: bool,
    as_json: bool,
    junit: Path | None,
    html: Path | None,
) -> None:
    if model is None:
        raise Refusal("--endpoint needs the model's name on the server: give --model NAME")
    if reference is not None:
        require_folder(reference)

    def make() -> BatteryReport:
        from flashnorm.verify.endpoint.suite import endpoint_battery

        return endpoint_battery(
            url,
            model,
            reference=reference,
            level=level.value,
            only=run_battery.names(only),
            progress=None if quiet else partial(say, "verify"),
        )

    run_battery.run(make, as_json=as_json, junit=junit, html=html)


def _torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    import torch

    return getattr(torch, dtype.value) if dtype else None


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
