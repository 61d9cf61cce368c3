"""The preallocated cache of keys and values: its size is known, and checked, before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashnorm.errors import CapacityError
from flashnorm.runtime.decode.spec import Spec

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Cache:
    """Keys and values by layer, each (slots, kv_heads, max_length, head_dim) in the model's dtype.

    Keys are stored as attention reads them, normed and rotated.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def cache_bytes(spec: Spec, slots: int, max_length: int) -> int:
    """What `allocate` will take."""
    per_token = sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers)
    return slots * max_length * per_token * spec.dtype.itemsize


def allocate(spec: Spec, slots: int, max_length: int) -> Cache:
    """A cache on the model's device. Raises `CapacityError`, before anything is allocated, where it does not fit."""
    needed, there = cache_bytes(spec, slots, max_length), available_bytes(spec.device)
    if there is not None and needed > there:
        raise CapacityError(
            f"a cache of {slots} sequences of {max_length} tokens takes {needed / 2**20:,.0f} MiB, and "
            f"{there / 2**20:,.0f} MiB are free on {spec.device}; ask for fewer sequences or a shorter max_length"
        )

    def zeros() -> tuple[Tensor, ...]:
        attentions = (layer.attention for layer in spec.layers)
        return tuple(
            torch.zeros(slots, a.kv_heads, max_length, a.head_dim, dtype=spec.dtype, device=spec.device)
            for a in attentions
        )

    return Cache(zeros(), zeros())


def available_bytes(device: torch.device) -> int | None:
    """Free memory, what PyTorch holds without using it included; None where the system does not tell."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
