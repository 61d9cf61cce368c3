"""A LoRA adapter of a model, made one for its folded form, and back.

On a folded base a weight is W diag(g) and reads the norm without its gain, so the adapter's A must become A diag(g)
(`algebra.fold_lora`); left as it is, the adapter loads without a word and computes something else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from flashnorm import algebra
from flashnorm.checkpoint.adapted import Target, copy_target, factors_target, find_weight
from flashnorm.checkpoint.adapter import CONFIG, NOTE, WEIGHTS, Adapter, Note, Side, note_bytes, open_adapter
from flashnorm.checkpoint.folded_base import FoldedBase, Gain, Weight, open_folded_base
from flashnorm.checkpoint.source import open_source
from flashnorm.checkpoint.staging import check_output, copy_file, new_folder, write_file
from flashnorm.checkpoint.tree import file_size
from flashnorm.errors import CheckpointError


@dataclass(frozen=True)
class LoraReport:
    """What a translation did.

    `base`: the base model that the new config names. `scaled`: the modules and parameters whose factors or copies
    changed; `unchanged`: those that read no folded norm; `shifted`: those whose adapter now adds a constant, since a
    norm's bias has moved.
    """

    out: str
    side: Side
    base: str | None
    scaled: tuple[str, ...]
    unchanged: tuple[str, ...]
    shifted: tuple[str, ...]


def translate_lora(
    adapter: str | os.PathLike[str],
    base: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Side = "folded",
    trust_remote_code: bool = False,
) -> LoraReport:
    """Write the adapter folder `adapter`, made for the other side of a fold, to the new folder `out`.

    `base`: the folded checkpoint. `to`: "folded" takes an adapter of the original base, "original" one that was trained
    on the folded base. Base and adapter together compute the same before and after, up to one rounding of each changed
    number to its dtype. All other files are kept; a note marks the output, so that it is not translated twice.

    Raises `CheckpointError` where the adapter is not plain LoRA, changes a norm, does not match the base, was
    translated already, or (`to="original"`) reads a gain of zero, and `OutputError` where `out` cannot be written;
    nothing is left then.
    """
    source, dst = Path(adapter), Path(out)
    check_output(source, dst)
    check_output(Path(base), dst)
    opened = open_adapter(source)
    folded = open_folded_base(base, trust_remote_code=trust_remote_code)
    _refuse_wrong_pair(opened, folded, to)
    work = _translated(opened, folded, to)
    _refuse_overflow(work.tensors)
    config = _new_config(opened, folded, to, work)
    note = Note(to, folded.fingerprint, opened.config.get("base_model_name_or_path"), opened.config.get("revision"))
    changed = {
        WEIGHTS: safetensors.torch.save(work.tensors, metadata=opened.metadata or None),
        CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
        NOTE: note_bytes(note),
    }
    _write(opened, dst, changed)
    base_name = config["base_model_name_or_path"]
    return LoraReport(str(dst), to, base_name, tuple(work.scaled), tuple(work.unchanged), tuple(work.shifts))


@dataclass
class _Work:
    """The new tensors by key, and what was done, while it is being done."""

    tensors: dict[str, torch.Tensor]
    scaled: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    shifts: dict[str, torch.Tensor] = field(default_factory=dict)  # module -> what its B must add

    def record(self, name: str, changed: bool) -> None:
        (self.scaled if changed else self.unchanged).append(name)


def _refuse_wrong_pair(adapter: Adapter, base: FoldedBase, to: Side) -> None:
    note = adapter.note
    if note and note.side == to:
        raise CheckpointError(f"{adapter.folder} was translated for the {to} base already; use it as it is")
    if note and note.fingerprint != base.fingerprint:
        raise CheckpointError(
            f"{adapter.folder} was translated for another fold than {base.folder}; give the base of that fold"
        )
    for setting in ("trainable_token_indices", "ensure_weight_tying"):
        if base.untied and adapter.config.get(setting):
            raise CheckpointError(
                f"{adapter.folder} sets {setting}, which acts on a tied head, but {base.folder} has its head untied; "
                "fold the base without --untie"
            )


def _translated(adapter: Adapter, base: FoldedBase, to: Side) -> _Work:
    work = _Work(dict(adapter.tensors))
    targets = {}
    for module, keys in adapter.factors.items():
        key_a, key_b = (key for role, key in sorted(keys.items()) if role != "lora_B.bias")
        targets[module] = factors_target(base, module, work.tensors[key_a], work.tensors[key_b])
        _translate_factors(work, module, targets[module], key_a, key_b, to)
    for path, key in adapter.copies.items():
        _translate_copy(work, base, path, key, to, adapter)
    for module in adapter.tokens:
        weight = find_weight(base, f"{module}.weight")
        if weight is None or weight.gains != ():
            raise CheckpointError(
                f"the adapter trains single rows of {module!r}, which folding scaled; train it on the folded base"
            )
        work.record(module, changed=False)
    if work.shifts:
        _add_biases(work, adapter, targets)
    return work


def _translate_factors(work: _Work, module: str, target: Target, key_a: str, key_b: str, to: Side) -> None:
    a, b = work.tensors[key_a], work.tensors[key_b]
    before = after = a.double(), b.double()  # factors are small, and so several gains still make one rounding
    for gain, axis in target.gains:
        change = algebra.fold_lora if to == "folded" else algebra.unfold_lora
        with _zero_gains_named(gain, module):
            after = change(*after, gain.values, axis, gain.channels)
    work.tensors[key_a], work.tensors[key_b] = after[0].to(a.dtype), after[1].to(b.dtype)
    work.record(module, changed=bool(target.gains))
    # An adapter of the original sees the norm's bias b in its input, and adds B A b; on the folded base b is not there.
    original, sign = (before, 1.0) if to == "folded" else (after, -1.0)
    for gain, axis in target.gains:
        if gain.shift is None:
            continue
        if axis != 1 or not target.module:
            raise CheckpointError(
                f"the adapter changes {target.weight.name}, and the bias of {gain.norm} has moved behind it, where "
                "PEFT cannot add the adapter's share of it; train it on the folded base instead"
            )
        share = sign * algebra.lora_shift(*original, gain.shift, gain.channels)
        work.shifts[module] = work.shifts.get(module, torch.zeros_like(share)) + share


def _translate_copy(work: _Work, base: FoldedBase, path: str, key: str, to: Side, adapter: Adapter) -> None:
    """A whole weight that the adapter replaces changes as the base's own did."""
    copy = work.tensors[key]
    weight = copy_target(base, path, copy)
    if weight.new and to == "original":
        raise CheckpointError(
            f"the adapter replaces {path!r}, a bias that the original base does not have; keep using it with the "
            "folded one"
        )
    changed = copy.to(torch.promote_types(copy.dtype, torch.float32))
    for gain in weight.gains or ():
        change = algebra.fold_gain if to == "folded" else algebra.unfold_gain
        with _zero_gains_named(gain, path):
            changed = change(changed, gain.values, gain.axis, gain.channels)
    shifted = next((gain.norm for gain in weight.gains or () if gain.shift is not None), None)
    held = f"{path.rpartition('.')[0]}.bias" in adapter.copies
    if shifted and not held and not _is_bases_own(base, weight, changed if to == "folded" else copy):
        raise CheckpointError(
            f"the adapter replaces {path!r}, and the bias of {shifted} has moved behind it, into a bias that the "
            "adapter does not hold; train it on the folded base instead"
        )
    moved = _moved_into(base, path, weight, to, adapter)
    if moved is not None:
        changed = changed + moved if to == "folded" else changed - moved
    work.tensors[key] = changed.to(copy.dtype)
    work.record(path, changed=bool(weight.gains) or moved is not None)


def _is_bases_own(base: FoldedBase, weight: Weight, folded: torch.Tensor) -> bool:
    """Whether an adapter's copy, as it is on the folded base, is the base's own weight: PEFT copies whole embeddings.

    The base rounded it once, and the adapter may have rounded it in another dtype before.
    """
    source = open_source(base.folder)
    if weight.name not in source.tensors or source.tensors[weight.name].shape != tuple(folded.shape):
        return False
    stored = source.read(weight.name)
    unit = max(torch.finfo(dtype).eps for dtype in (stored.dtype, folded.dtype))
    return bool(((stored.double() - folded.double()).abs() <= unit * stored.double().abs()).all())


def _moved_into(base: FoldedBase, path: str, weight: Weight, to: Side, adapter: Adapter) -> torch.Tensor | None:
    """What folding adds to the adapter's copy of a bias: W b, with the adapter's own W where it replaces that too."""
    module, _, name = path.rpartition(".")
    replaced = adapter.copies.get(f"{module}.weight") if name == "bias" else None
    reader = find_weight(base, f"{module}.weight") if weight.moved is not None and replaced is not None else None
    if reader is None:
        return weight.moved
    own, total = adapter.tensors[replaced or ""].double(), None
    for gain in reader.gains or ():
        if to == "original":
            with _zero_gains_named(gain, path):
                own = algebra.unfold_gain(own, gain.values, gain.axis, gain.channels)
    for gain in reader.gains or ():
        if gain.shift is not None:
            total = algebra.fold_shift(own, gain.shift, total, gain.axis, gain.channels)
    return total


@contextmanager
def _zero_gains_named(gain: Gain, module: str) -> Iterator[None]:
    try:
        yield
    except algebra.ZeroGainError as error:
        raise CheckpointError(
            f"the gain of {gain.norm} is zero at channel {error.channels[0]}, so what the adapter of {module} does "
            "there cannot be done on the original base; keep using it with the folded one"
        ) from error


def _add_biases(work: _Work, adapter: Adapter, targets: Mapping[str, Target]) -> None:
    """Give every adapted module the bias that PEFT's `lora_bias` asks for, zero where no norm's bias has moved."""
    for module, keys in adapter.factors.items():
        if "lora_B.weight" not in keys or not targets[module].module:
            shifted = next(iter(work.shifts))
            raise CheckpointError(
                f"the adapter of {shifted} needs a bias, since a norm's bias has moved, but PEFT allows none beside "
                f"an adapter of {module}; train them as two adapters"
            )
        factor = work.tensors[keys["lora_B.weight"]]
        key = keys.get("lora_B.bias", keys["lora_B.weight"].removesuffix("weight") + "bias")
        before = work.tensors[key].double() if key in work.tensors else torch.zeros(factor.shape[0]).double()
        work.tensors[key] = (before + work.shifts.get(module, 0.0)).to(factor.dtype)


def _refuse_overflow(tensors: Mapping[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{key!r} leaves the range of {tensor.dtype} when it is translated; save the adapter in float32 first"
            )


def _new_config(adapter: Adapter, base: FoldedBase, to: Side, work: _Work) -> dict[str, Any]:
    """The adapter's config for its new base: PEFT may load the base that it names, so it must not name the old one.

    By an absolute path: who loads the adapter stands in another folder than who translated it.
    """
    config = dict(adapter.config)
    config["base_model_name_or_path"], config["revision"] = os.path.abspath(base.folder), None
    if to == "original":
        note = adapter.note
        config["base_model_name_or_path"], config["revision"] = (note.base, note.revision) if note else (None, None)
    if work.shifts:
        config["lora_bias"] = True
        if not isinstance(config.get("init_lora_weights", True), bool):
            config["init_lora_weights"] = (
                True  # PEFT allows no other start with lora_bias; loading overwrites it anyway
            )
    return config


def _write(adapter: Adapter, dst: Path, changed: Mapping[str, bytes]) -> None:
    """Write the new folder whole, or leave nothing. It holds the adapter's other files as they are."""
    kept = [name for name in adapter.files if name not in changed]
    size = sum(len(content) for content in changed.values()) + sum(file_size(adapter.folder / name) for name in kept)
    with new_folder(dst, size, CONFIG) as folder:  # without its config no folder is an adapter
        for name in kept:
            copy_file(adapter.folder / name, folder, name, CONFIG)
        for name, content in changed.items():
            write_file(folder, name, content, CONFIG)
