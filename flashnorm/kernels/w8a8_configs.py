"""The ways to multiply by a weight in eight bits, and their parameters: plain data, importable where Triton is not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Reference:
    """Plain torch on widened codes, or the CPU's own integer product."""


@dataclass(frozen=True)
class Library:
    """A kernel that quantises, then the library's matmul."""


@dataclass(frozen=True)
class CodesGemv:
    """Outputs per program, and warps."""

    block_n: int = 4
    warps: int = 4


@dataclass(frozen=True)
class CodesSplitK:
    """Rows of W per program, K per step, programs along K, pipeline depth, warps; outputs per program of the
    reduction; inputs per row of W asked into the L2 before the wait."""

    block_n: int = 64
    block_k: int = 256
    split: int = 2
    stages: int = 4
    warps: int = 4
    reduce_n: int = 512
    prefetch: int = 0


Config = Reference | Library | CodesGemv | CodesSplitK

_FAMILIES: MappingProxyType[str, type[Config]] = MappingProxyType(
    {"reference": Reference, "library": Library, "codes_gemv": CodesGemv, "codes_split_k": CodesSplitK}
)
_NAMES = MappingProxyType({family: name for name, family in _FAMILIES.items()})


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as tables write it: its family's name and its parameters."""
    return {"family": _NAMES[type(config)], **asdict(config)}


def from_dict(entry: dict[str, Any]) -> Config:
    """The inverse of `to_dict`. Raises `KeyError` or `TypeError` on a family or parameter that does not exist."""
    parameters = dict(entry)
    return _FAMILIES[parameters.pop("family")](**parameters)
