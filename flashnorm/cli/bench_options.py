"""What the benchmarks share: where the record goes, what it says of its origin, and the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashnorm.errors import DeviceError

if TYPE_CHECKING:
    import torch

RecordFile = Annotated[
    Path | None, typer.Option("--record", help="Write the record, with every sample, to this file after every row.")
]
Commit = Annotated[str | None, typer.Option("--commit", help="The commit to name in the record, where git cannot say.")]


def gpu() -> torch.device:
    """The GPU that is measured. Raises `DeviceError` where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("this benchmark needs a CUDA GPU and none was found")
    return torch.device("cuda", 0)
