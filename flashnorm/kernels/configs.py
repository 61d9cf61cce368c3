"""The ways to run a deferred norm and their parameters: plain data, importable where Triton is not.

Each class is one family of kernels and names its parameters; the module of the same name runs it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Reference:
    """Plain torch: any device, any dtype."""


@dataclass(frozen=True)
class Gemv:
    """Outputs per program, inputs per step, warps, and inputs per row of W asked into the L2 before the wait."""

    block_n: int = 2
    block_k: int = 2048
    warps: int = 4
    prefetch: int = 0


@dataclass(frozen=True)
class SplitK:
    """Rows of W per program, K per step, programs along K, pipeline depth, warps; outputs per program of the
    reduction; inputs per row of W asked into the L2 before the wait."""

    block_n: int = 64
    block_k: int = 128
    split: int = 4
    stages: int = 4
    warps: int = 4
    reduce_n: int = 512
    prefetch: int = 0


@dataclass(frozen=True)
class Fused:
    """Rows of x, outputs, and K per step of one program; warps; pipeline depth; inputs per row of W asked into the L2
    before the wait."""

    block_m: int = 16
    block_n: int = 32
    block_k: int = 64
    warps: int = 4
    stages: int = 4
    prefetch: int = 0


@dataclass(frozen=True)
class DeferredGemm:
    """Tile of y (`block_m` by `block_n + extra_n`), K per step, tiles of rows per group, warps, pipeline depth; rows
    per program of the scale kernel, and bytes per row of W that it asks into the L2; whether a tile is stored in two
    halves, which frees shared memory for a deeper pipeline (`extra_n` must be 0); whether each tile takes its rows'
    scale itself, in place of the scale kernel: one launch less, more reading, right for small K."""

    block_m: int = 128
    block_n: int = 128
    extra_n: int = 0
    block_k: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 4
    scale_rows: int = 1
    prefetch: int = 0
    halves: bool = False
    own_scale: bool = False


@dataclass(frozen=True)
class NormLinear:
    """Rows of x per program, warps, bytes per row of W asked into the L2 meanwhile, and whether x is read only once."""

    rows: int = 1
    warps: int = 4
    prefetch: int = 0
    stream: bool = False


@dataclass(frozen=True)
class TmaGemm:
    """Tile of y; consuming warpgroups, which share the tile's rows; pipeline depth; where the norm is taken: "inside"
    the multiplication, in so many blocks "beside" it, or nowhere ("none", a bare matmul);
    tiles of rows per group; steps of W asked into the L2 before the wait; rows of x that a warp beside the tiles reads
    at once (4 to 32)."""

    block_m: int = 128
    block_n: int = 192
    consumers: int = 2
    stages: int = 4
    norm: str = "inside"
    beside: int = 4
    group: int = 8
    prefetch: int = 0
    rows: int = 8


@dataclass(frozen=True)
class Streamed:
    """Columns of W in a slot of the ring; slots; consuming warps; blocks per multiprocessor; slots behind the ring that
    are asked into the L2; rows of W in a slot (a power of two, at most 32); slots that may be on their way at once;
    cycles for each KiB that a block asks of memory; slots that are not asked for yet when the next kernel may start:
    0 lets it start at the end, None at once."""

    chunk_k: int = 2048
    stages: int = 12
    warps: int = 8
    blocks: int = 1
    prefetch: int = 0
    rows: int = 1
    on_the_way: int = 64
    pace: int = 0
    lead: int | None = None


@dataclass(frozen=True)
class Skinny:
    """Rows of W of a cluster, blocks of a cluster, which share K, and pipeline depth, in steps of 64 along K."""

    rows: int = 64
    split: int = 4
    stages: int = 8


Config = Reference | Gemv | SplitK | Fused | DeferredGemm | NormLinear | TmaGemm | Streamed | Skinny

FAMILIES = MappingProxyType(
    {
        "reference": Reference,
        "gemv": Gemv,
        "split_k": SplitK,
        "fused": Fused,
        "deferred_gemm": DeferredGemm,
        "norm_linear": NormLinear,
        "tma_gemm": TmaGemm,
        "streamed": Streamed,
        "skinny": Skinny,
    }
)
_NAMES = MappingProxyType({family: name for name, family in FAMILIES.items()})


def family_name(config: Config) -> str:
    """The name of the configuration's family, as tables and records write it."""
    return _NAMES[type(config)]


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as tables write it: its family's name and its parameters."""
    return {"family": family_name(config), **asdict(config)}


def from_dict(entry: dict[str, Any]) -> Config:
    """The inverse of `to_dict`. Raises `KeyError` or `TypeError` on a family or parameter that does not exist."""
    parameters = dict(entry)
    return FAMILIES[parameters.pop("family")](**parameters)
