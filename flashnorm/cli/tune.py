"""`flashnorm tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashnorm.cli.options import AsJson, Quiet, counted, print_json, say

if TYPE_CHECKING:
    from flashnorm.kernels.tuning import Tuned


def command(
    output: Annotated[
        Path | None,
        typer.Argument(help="Where to write the table. Default: this machine's own, which every later call uses."),
    ] = None,
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="K,N of a weight; may be repeated.")] = None,
    gated: Annotated[
        list[str] | None, typer.Option("--gated", help="K,N of gate and up projections to N outputs; may be repeated.")
    ] = None,
    rows: Annotated[str, typer.Option("--rows", help="The numbers of rows to tune for.")] = "1,16,64,256,1024,4096",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Find the fastest right configuration of the deferred norm for each weight shape on this GPU.

    The table is written after every shape, and shapes that it has from before are kept.
    """
    wanted: list[tuple[tuple[int, ...], str | None]] = [(_numbers(shape, 2), None) for shape in shapes or ()]
    wanted += [(_numbers(shape, 2), "silu") for shape in gated or ()]
    counts = _numbers(rows, None)
    if not wanted:
        raise typer.BadParameter("give at least one --shape or --gated")

    import torch

    from flashnorm.errors import DeviceError
    from flashnorm.kernels.dispatch import triton_runs
    from flashnorm.kernels.learned import table_path, write
    from flashnorm.kernels.tuning import Shape, tune

    if not torch.cuda.is_available() or not triton_runs(torch.device("cuda", 0)):
        raise DeviceError("tuning needs a CUDA GPU of compute capability 8 or later and Triton; none was found")
    device = torch.device("cuda", 0)
    about = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": "bfloat16",
    }
    path = output or table_path(device)
    entries: list[dict[str, object]] = []
    problems = [Shape(m, k, n, activation) for (k, n), activation in wanted for m in counts]
    for tuned in tune(problems, device):
        if not quiet:
            _report(tuned)
        entries.append(_entry(tuned))
        write(path, entries[-1:], about)
    if as_json:
        print_json({**about, "out": str(path), "entries": entries})
        return
    typer.echo(f"{counted(len(entries), 'configuration')} written to {path}")


def _numbers(text: str, count: int | None) -> tuple[int, ...]:
    """Positive numbers between commas, `count` of them unless None."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or count not in (None, len(parts)):
        wanted = "positive numbers between commas" if count is None else f"{count} of them, as in 4096,6144"
        raise typer.BadParameter(f"{text!r} is not {wanted}")
    return tuple(map(int, parts))


def _report(tuned: Tuned) -> None:
    shape = tuned.shape
    say(
        "tune",
        f"M={shape.m} K={shape.k} N={shape.n}{' gated' if shape.activation else ''}: {tuned.microseconds:.2f} us, "
        f"{tuned.config}, {len(tuned.dropped)} of {tuned.tried} dropped",
    )
    for config, why in tuned.dropped.items():
        say("tune", f"dropped {config}: {why}")


def _entry(tuned: Tuned) -> dict[str, object]:
    from flashnorm.kernels.configs import to_dict

    shape = tuned.shape
    return {
        "m": shape.m,
        "k": shape.k,
        "n": shape.n,
        "gated": shape.activation is not None,
        "config": to_dict(tuned.config),
        "microseconds": round(tuned.microseconds, 3),
    }
