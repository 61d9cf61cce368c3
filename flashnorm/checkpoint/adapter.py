"""A PEFT adapter folder: opened, refused unless it is plain LoRA, and read whole, since adapters are small."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from flashnorm.checkpoint.header import read_header
from flashnorm.checkpoint.tree import list_files, read_json, reading
from flashnorm.errors import CheckpointError
from flashnorm.folders import require_folder
from flashnorm.version import __version__

Side = Literal["folded", "original"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NOTE = "flashnorm_lora.json"

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<role>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB])")
_TOKENS = re.compile(r"(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta")

# Settings of LoraConfig under which the adapter is not W + s B A with W the base's own weight.
_NOT_PLAIN = {
    "use_dora": "DoRA divides by the norms of W + B A, which folding changes",
    "use_qalora": "QA-LoRA reads averages over groups of inputs, and a gain differs within a group",
    "use_bdlora": "BD-LoRA stores only the blocks on the diagonal of a factor",
    "kasa_config": "KaSA truncates the base's weights by their singular values, which folding changes",
    "arrow_config": "Arrow routes tokens by the singular vectors of the factors, which translation changes",
    "monteclora_config": "MonteCLoRA samples its factors",
    "layer_replication": "its layers are numbered in a model with repeated layers",
    "megatron_config": "it is sharded for Megatron",
}
# Ways of starting that leave the base alone, so that the adapter's factors are all there is to it.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Note:
    """`flashnorm_lora.json`: for which side of which fold an adapter was translated, and the base it was for."""

    side: Side
    fingerprint: str  # of the folded base, see `FoldedBase`
    base: str | None  # base_model_name_or_path before the translation
    revision: str | None
    tool_version: str = __version__
    schema_version: int = 1


@dataclass(frozen=True)
class Adapter:
    """A plain LoRA adapter.

    `factors`: module -> role ("lora_A.weight", ...) -> key in `tensors`. `copies`: parameter -> key, for whole weights
    that the adapter replaces. `tokens`: module -> key, for rows of an embedding that it replaces.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    files: tuple[str, ...]
    factors: dict[str, dict[str, str]]
    copies: dict[str, str]
    tokens: dict[str, str]
    note: Note | None


def open_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Open an adapter folder as PEFT saves it.

    Raises `CheckpointError` where the folder is incomplete or damaged, holds more than one adapter, holds values that
    are not finite, or where its adapter is not plain LoRA.
    """
    folder = Path(path)
    require_folder(folder, "LoRA adapter folder")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG}; give a LoRA adapter folder as PEFT's `save_pretrained` wrote it"
        )
    files = list_files(folder)
    _refuse_other_files(folder, files)
    config = read_json(folder / CONFIG)
    _refuse_special(folder, config)
    header = read_header(folder / WEIGHTS)
    with reading(folder / WEIGHTS):
        tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{folder / WEIGHTS} holds {name!r} as {tensor.dtype}; save the adapter unquantised")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{folder / WEIGHTS} holds NaN or infinity in {name!r}; the adapter is broken")
    factors, copies, tokens = _sorted_out(folder, tensors)
    return Adapter(folder, config, tensors, header.metadata, files, factors, copies, tokens, _read_note(folder))


def note_bytes(note: Note) -> bytes:
    """The text of `flashnorm_lora.json`."""
    return (json.dumps(asdict(note), indent=2) + "\n").encode()


def _read_note(folder: Path) -> Note | None:
    path = folder / NOTE
    if not path.exists():
        return None
    try:
        note = Note(**read_json(path))
    except TypeError:
        note = None
    if note is None or note.schema_version != 1 or note.side not in ("folded", "original"):
        raise CheckpointError(
            f"{path} is not a note that this version wrote; use the version that translated the adapter"
        )
    return note


def _refuse_other_files(folder: Path, files: tuple[str, ...]) -> None:
    if WEIGHTS not in files:
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; load the adapter with PEFT and `save_pretrained` it to get one"
            if "adapter_model.bin" in files
            else f"{folder} has no {WEIGHTS}; download or save the whole adapter"
        )
    for name in files:
        if name != WEIGHTS and Path(name).name in (WEIGHTS, "adapter_model.bin"):
            raise CheckpointError(
                f"{folder} holds a second adapter in {name!r}, which would stay untranslated; move it out of the folder"
            )


def _refuse_special(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder} holds an adapter of type {kind}; only LORA can be translated")
    for setting, reason in _NOT_PLAIN.items():
        if config.get(setting):
            raise CheckpointError(f"{folder} sets {setting}: {reason}; only plain LoRA can be translated")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{folder} sets init_lora_weights to {start!r}, with which PEFT may change the base's weights; convert it "
            "to plain LoRA first (`save_pretrained` with path_initial_model_for_weight_conversion)"
        )


def _sorted_out(
    folder: Path, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, dict[str, str]], dict[str, str], dict[str, str]]:
    factors: dict[str, dict[str, str]] = defaultdict(dict)
    copies: dict[str, str] = {}
    tokens: dict[str, str] = {}
    for key in tensors:
        path = key.removeprefix(_PREFIX)
        if factor := _FACTOR.fullmatch(path):
            factors[factor["module"]][factor["role"]] = key
        elif rows := _TOKENS.fullmatch(path):
            tokens[rows["module"]] = key
        elif path == key or ".lora_" in path:
            raise CheckpointError(f"{folder / WEIGHTS} holds {key!r}, which is no name that PEFT gives to plain LoRA")
        else:
            copies[path.replace(".base_layer.", ".")] = key
    for module, roles in factors.items():
        pairs = {"lora_A.weight", "lora_B.weight"}, {"lora_embedding_A", "lora_embedding_B"}
        if set(roles) - {"lora_B.bias"} not in pairs:
            raise CheckpointError(
                f"{folder / WEIGHTS} holds only {sorted(roles)} of {module!r}; save the adapter again"
            )
    return dict(factors), copies, tokens
