"""What the commands share: options that mean the same everywhere, and how results and progress are printed."""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnorm.errors import DeviceError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

# A pipe has no width of its own; in this one no table of ours needs to break a word.
PIPE_WIDTH = 160

TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the model code that the folder brings along.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


class Dtype(str, Enum):
    """What `--dtype` takes: torch's names."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def print_json(table: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(table, indent=2))


def say(command: str, step: str) -> None:
    """One line of progress on standard error."""
    print(f"{command}: {step}", file=sys.stderr, flush=True)


def counted(count: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def console() -> Console:
    """For tables on standard output, as wide as the terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def device_named(name: str | None) -> torch.device:
    """What `--device` means; None: the first GPU, else the CPU. Raises `DeviceError` where it cannot be used."""
    import torch

    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(f"--device {name} cannot be used here; give cpu, or cuda on a machine with a GPU") from error
    return device
