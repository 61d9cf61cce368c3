"""What an audit, which goes by the config alone, cannot know: the folder is folded already, or cannot be folded."""

from __future__ import annotations

import os
from pathlib import Path

from flashnorm.checkpoint.manifest import is_folded, read_manifest
from flashnorm.checkpoint.quantised import refuse_quantised
from flashnorm.checkpoint.source import CONFIG, open_source
from flashnorm.checkpoint.tree import list_files, read_json
from flashnorm.errors import Refusal


def remarks(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Sentences on why `flashnorm fold` would not fold what the audit of `folder` calls foldable; none where it would.

    Reads the headers of the weights where there are any, and no weights.
    """
    folder = Path(folder)
    try:
        if is_folded(folder):
            manifest = read_manifest(folder)
            return (
                f"{folder} is folded already, in {manifest.mode} mode: {len(manifest.sites)} of these norms have their "
                "gain at one",
            )
        files = list_files(folder)
        if any(".safetensors" in name for name in files):
            open_source(folder)
        else:
            refuse_quantised(folder, files, read_json(folder / CONFIG), {})
    except Refusal as refusal:
        return (f"`flashnorm fold` refuses this folder: {refusal}",)
    return ()
