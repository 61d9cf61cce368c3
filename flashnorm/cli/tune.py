"""`flashnorm tune`."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def command(
    output: Path = typer.Argument(..., help="Where to write the table."),
    shapes: list[str] = typer.Option(..., "--shape", help="K,N of a weight; may be repeated."),
    rows: str = typer.Option("1,16,64,256,1024,4096", "--rows", help="The numbers of rows to tune for."),
    as_json: bool = typer.Option(False, "--json", help="Print the table as well."),
) -> None:
    """Find the fastest right configuration of the deferred norm for each weight shape on this GPU."""
    import torch

    from flashnorm.errors import DeviceError
    from flashnorm.kernels.configs import to_dict
    from flashnorm.kernels.dispatch import triton_runs
    from flashnorm.kernels.tuning import Shape, tune

    if not torch.cuda.is_available() or not triton_runs(torch.device("cuda", 0)):
        raise DeviceError("tuning needs a CUDA GPU of compute capability 8 or later and Triton; none was found")
    device = torch.device("cuda", 0)
    wanted = [Shape(int(m), *map(int, shape.split(","))) for shape in shapes for m in rows.split(",")]
    entries = []
    for tuned in tune(wanted, device):
        shape = tuned.shape
        typer.echo(
            f"M={shape.m} K={shape.k} N={shape.n}: {tuned.microseconds:.2f} us, {tuned.config}, "
            f"{len(tuned.dropped)} of {tuned.tried} dropped",
            err=True,
        )
        for config, why in tuned.dropped.items():
            typer.echo(f"  dropped {config}: {why}", err=True)
        entries.append(
            {
                "m": shape.m,
                "k": shape.k,
                "n": shape.n,
                "config": to_dict(tuned.config),
                "microseconds": round(tuned.microseconds, 3),
            }
        )
    table = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": "bfloat16",
        "entries": entries,
    }
    text = json.dumps(table, indent=1) + "\n"
    output.write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(text)
