"""What a folder says beyond its model: things that an audit or a fold neither knows nor looks at, told as notes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashnorm.checkpoint.foreign import other_weights
from flashnorm.checkpoint.manifest import is_folded, read_manifest
from flashnorm.checkpoint.quantised import refuse_quantised
from flashnorm.checkpoint.source import CONFIG, open_source
from flashnorm.checkpoint.tree import list_files, read_json
from flashnorm.errors import Refusal

PIPELINE = "modules.json"  # the modules of a sentence-transformers model, the Transformers one first


def remarks(folder: str | os.PathLike[str], trust_remote_code: bool = False) -> tuple[str, ...]:
    """What the audit of `folder`, which goes by its config alone, cannot know: sentences, or nothing.

    Why `flashnorm fold` would refuse the folder, or else what a fold would leave as it is. Reads the headers of the
    weights where there are any, and no weights.
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
        config = read_json(folder / CONFIG)
        if any(".safetensors" in name for name in files):
            open_source(folder)
        else:
            refuse_quantised(folder, files, config, {})
    except Refusal as refusal:
        return (f"`flashnorm fold` refuses this folder: {refusal}",)
    return left_alone(files, config, trust_remote_code)


def left_alone(files: tuple[str, ...], config: Mapping[str, Any], trust_remote_code: bool) -> tuple[str, ...]:
    """What folding does not look at in a folder of these files and this config, one sentence each."""
    notes = [
        f"{name} holds weights in another format; it is copied as it is, not folded" for name in other_weights(files)
    ]
    if config.get("auto_map") and not trust_remote_code:
        notes.append(
            f"{CONFIG} names model code of the folder's own (auto_map), which loaders run when they are told to trust "
            f"it; this is about the model that Transformers has for {config.get('model_type')!r}: pass "
            "--trust-remote-code to go by the folder's"
        )
    if PIPELINE in files:
        notes.append(
            f"{PIPELINE} makes this a sentence-transformers model: what it adds to the Transformers model (pooling, "
            "dense layers, normalisation) is copied as it is and was not checked"
        )
    return tuple(notes)
