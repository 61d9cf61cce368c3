"""Shared memory of one block of each kernel, as its `struct Shared` lays it out, with room to align it."""

from __future__ import annotations

from dataclasses import dataclass

from flashnorm.kernels.configs import Skinny, Streamed, TmaGemm

SHARED_MEMORY = 232_448  # bytes that one block may have on Hopper
TWO_BLOCKS = 115_712  # and each of two: a multiprocessor has 228 KiB, and takes one for itself with each
BLOCK_K = 64
GROUP = 32  # outputs that `streamed.cu` finishes at once


def tma_gemm_bytes(config: TmaGemm, *, gated: bool = False) -> int:
    """Bytes of `deferred.cu`: the ring of tiles, the outputs staged for their store, scales and barriers."""
    tiles = config.stages * (config.block_m + config.block_n) * 2 * BLOCK_K
    staging = config.consumers * 2 * 64 * 2 * stored_columns(config.block_n // (2 if gated else 1))
    return tiles + -(-staging // 1024) * 1024 + 8 * config.block_m + 16 * config.stages + 32 + 1024


def streamed_slot(config: Streamed, k: int) -> int:
    """Bytes of a slot of `streamed.cu`: its rows without a gap, and what is missing to a multiple of 128."""
    return -(-2 * config.rows * min(config.chunk_k, k) // 128) * 128


def streamed_bytes(config: Streamed, k: int, *, gated: bool = False) -> int:
    """Bytes of `streamed.cu` for rows of `k`: the ring, and the sums of each warp."""
    ring = config.stages * (streamed_slot(config, k) + 20) + 6 * 8  # barriers and a count; what is waited for
    sums = 4 * (2 * (2 if gated else 1) * GROUP * (config.warps + 1) + config.warps)
    return ring + sums + 2 * 128


def tiles_of(rows: int) -> int:
    """`skinny.cu`'s tiles of eight rows of x, a power of two: few kernels serve all."""
    return 1 << (-(-rows // 8) - 1).bit_length()


def skinny_slot(config: Skinny, tiles: int) -> int:
    """Bytes of a slot of `skinny.cu`: a tile of W, and one of x of so many times eight rows."""
    return (config.rows + 8 * tiles) * 2 * BLOCK_K


def skinny_bytes(config: Skinny, tiles: int) -> int:
    """Bytes of `skinny.cu`: the ring, and the sums of both halves of the warps."""
    ring = config.stages * (skinny_slot(config, tiles) + 20) + 6 * 8 + 128  # barriers and a count; what is waited for
    sums = 2 * 8 * tiles * (config.rows + 8 + 1) * 4
    return -(-(ring + sums) // 1024) * 1024 + 1024


@dataclass(frozen=True)
class Ring:
    """Bytes of a slot, and the number of slots."""

    slot: int
    stages: int


def step_bytes(ring: Ring, warps: int, inputs: int, sharing: int, head_dim: int) -> int:
    """Bytes of `step.cu`. `inputs`: bytes of a linear's inputs; `sharing`: query heads of a key head."""
    sums = (2 * (2 * GROUP + 32 // warps) + 2) * warps * 4
    heads, mixed = _head_bytes(warps, sharing, head_dim)
    layers_and_shares = 2 * 200 + 5 * 8 + 6 * 8  # and what is waited for
    padding = 6 * 16 + 3 * 128
    return ring.stages * (ring.slot + 20) + max(inputs, mixed) + sums + heads + layers_and_shares + padding


def attention_bytes(ring: Ring, warps: int, sharing: int, head_dim: int) -> int:
    """Bytes of `attention.cu`: the ring, a block's heads, and what its warps have mixed."""
    heads, mixed = _head_bytes(warps, sharing, head_dim)
    padding = 6 * 8 + 3 * 128  # and what is waited for
    return ring.stages * (ring.slot + 20) + mixed + heads + padding


def _head_bytes(warps: int, sharing: int, head_dim: int) -> tuple[int, int]:
    """Bytes of `struct Heads` and of `Mixed` of attend.cuh."""
    each = head_dim + 16 * 8 + 8 + 3 * 8  # of a warp: a head, weights, what fades, scores and sums
    heads = 2 * (sharing + 2) * head_dim + 4 * warps * each + 4 * 8
    return heads, 4 * warps * sharing * head_dim


def stored_columns(width: int) -> int:
    """Columns of a tile of outputs that `deferred.cu` stages and stores together."""
    return next(columns for columns in (64, 32, 16, 8) if width % columns == 0)
