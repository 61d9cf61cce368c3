"""`flashnorm tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flashnorm.kernels.tuning import Tuned


def command(
    output: Path | None = typer.Argument(
        None, help="Where to write the table. Default: this machine's own, which every later call uses."
    ),
    shapes: list[str] = typer.Option([], "--shape", help="K,N of a weight; may be repeated."),
    gated: list[str] = typer.Option(
        [], "--gated", help="K,N of gate and up projections to N outputs; may be repeated."
    ),
    rows: str = typer.Option("1,16,64,256,1024,4096", "--rows", help="The numbers of rows to tune for."),
    as_json: bool = typer.Option(False, "--json", help="Print the found configurations as well."),
) -> None:
    """Find the fastest right configuration of the deferred norm for each weight shape on this GPU.

    The table is written after every shape, and shapes that it has from before are kept.
    """
    wanted = [(_numbers(shape, 2), None) for shape in shapes] + [(_numbers(shape, 2), "silu") for shape in gated]
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
        _report(tuned)
        entries.append(_entry(tuned))
        write(path, entries[-1:], about)
    typer.echo(f"{len(entries)} configurations are in {path}", err=True)
    if as_json:
        typer.echo(json.dumps({**about, "out": str(path), "entries": entries}, indent=1))


def _numbers(text: str, count: int | None) -> tuple[int, ...]:
    """Positive numbers between commas, `count` of them unless None."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or count not in (None, len(parts)):
        wanted = "positive numbers between commas" if count is None else f"{count} of them, as in 4096,6144"
        raise typer.BadParameter(f"{text!r} is not {wanted}")
    return tuple(map(int, parts))


def _report(tuned: Tuned) -> None:
    shape = tuned.shape
    typer.echo(
        f"M={shape.m} K={shape.k} N={shape.n}{' gated' if shape.activation else ''}: {tuned.microseconds:.2f} us, "
        f"{tuned.config}, {len(tuned.dropped)} of {tuned.tried} dropped",
        err=True,
    )
    for config, why in tuned.dropped.items():
        typer.echo(f"  dropped {config}: {why}", err=True)


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
