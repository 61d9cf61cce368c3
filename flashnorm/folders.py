"""One sentence for a path that is no folder, whichever command it was given to, told before torch is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flashnorm.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def require_folder(path: str | os.PathLike[str], what: str = "checkpoint folder") -> None:
    """Raise `CheckpointError` unless `path` is a folder, saying what to do instead. `what`: what is wanted."""
    folder = Path(path)
    if folder.is_dir():
        return
    if folder.suffix == ".gguf" and folder.exists():
        raise CheckpointError(f"{folder} is a GGUF file; import it first with `flashnorm import-gguf`")
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the {what} that it lies in")
    if _HUB_ID.fullmatch(str(folder)) and not folder.parent.exists():
        raise CheckpointError(
            f"{folder} does not exist; if it is a model of the Hugging Face Hub, download it with "
            f"`hf download {folder} --local-dir {folder.name}`, then give {folder.name}"
        )
    raise CheckpointError(f"{folder} does not exist; give a {what}")
