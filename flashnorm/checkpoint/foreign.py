"""Folders and files that are not a Transformers checkpoint in safetensors, each with the way to make one of it."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path

from flashnorm.checkpoint.tree import reading
from flashnorm.errors import CheckpointError
from flashnorm.folders import require_folder

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# Weights in other formats; beside safetensors they are a second copy of the same model.
_OTHER_WEIGHTS = ("pytorch_model*", "consolidated*", "*.gguf", "tf_model*", "flax_model*", "*.onnx")


def refuse_foreign(folder: Path) -> None:
    """Raise `CheckpointError` unless `folder` is a folder that may hold a safetensors checkpoint of a whole model."""
    require_folder(folder)
    with reading(folder):
        names = os.listdir(folder)
    if any(name in _ADAPTER_FILES for name in names):
        raise CheckpointError(
            f"{folder} holds a LoRA adapter, not a model; fold its base, then translate it with `flashnorm lora`"
        )
    if not any(".safetensors" in name for name in names):
        _refuse_other_weights(folder, names)


def other_weights(files: tuple[str, ...]) -> list[str]:
    """Files of the folder that hold weights in a format that folding copies but does not change."""
    return [name for name in files if any(fnmatch(Path(name).name, pattern) for pattern in _OTHER_WEIGHTS)]


def _refuse_other_weights(folder: Path, names: list[str]) -> None:
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise CheckpointError(f"{folder} holds a GGUF file, {gguf[0]!r}; import it first with `flashnorm import-gguf`")
    torch_files = [name for name in names if fnmatch(name, "*.bin") or fnmatch(name, "*.bin.index.json")]
    if torch_files:
        raise CheckpointError(
            f"{folder} has weights as .bin files only, which are programs as much as data; convert them once with "
            f"`AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained(NEW_FOLDER)`, "
            "copy the tokenizer files, and give NEW_FOLDER"
        )
    others = other_weights(tuple(names))
    if others:
        raise CheckpointError(f"{folder} has {others[0]!r} but no safetensors weights; convert it to safetensors first")
