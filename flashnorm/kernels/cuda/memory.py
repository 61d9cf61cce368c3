"""Shared memory of one block of each kernel, as its `struct Shared` lays it out, with room to align it."""

from __future__ import annotations

from dataclasses import dataclass

from flashnorm.kernels.configs import Streamed, TmaGemm

SHARED_MEMORY = 232_448  # bytes that one block may have on Hopper
BLOCK_K = 64
GROUP = 32  # outputs that `streamed.cu` finishes at once


def tma_gemm_bytes(config: TmaGemm, *, gated: bool = False) -> int:
    """Bytes of `deferred.cu`: the ring of tiles, the outputs staged for their store, scales and barriers."""
    tiles = config.stages * (config.block_m + config.block_n) * 2 * BLOCK_K
    staging = config.consumers * 2 * 64 * 2 * stored_columns(config.block_n // (2 if gated else 1))
    return tiles + -(-staging // 1024) * 1024 + 8 * config.block_m + 16 * config.stages + 32 + 1024


def streamed_bytes(config: Streamed, *, gated: bool = False) -> int:
    """Bytes of `streamed.cu`: the ring of chunks of rows, and the sums of each warp."""
    ring = config.stages * (2 * config.chunk_k + 16)
    sums = (2 * GROUP * (2 if gated else 1) + 1) * 4 * config.warps
    return ring + sums + 16 + 2 * 128


@dataclass(frozen=True)
class Ring:
    """Columns of a slot's tile of eight rows, and the number of slots."""

    columns: int
    stages: int

    @property
    def slot(self) -> int:
        """Bytes of a slot."""
        return 8 * (2 * self.columns + 64)


def step_bytes(ring: Ring, warps: int, sharing: int, head_dim: int) -> int:
    """Bytes of `step.cu`, but for the inputs of a linear. `sharing`: query heads of a key head."""
    sums = (2 * 2 * GROUP + 2) * warps * 4
    pairs = sharing * head_dim // 2
    scores = sharing * (ring.slot // 2 // head_dim + 4)
    heads = (sharing + 3) * head_dim + scores + 3 * sharing + 2 * pairs * max(1, 32 * warps // pairs)
    layers_and_shares = 2 * 200 + 5 * 8 + 6 * 8  # and what is waited for
    return ring.stages * (ring.slot + 16) + sums + 4 * heads + layers_and_shares + 5 * 16 + 3 * 128


def stored_columns(width: int) -> int:
    """Columns of a tile of outputs that `deferred.cu` stages and stores together."""
    return next(columns for columns in (64, 32, 16, 8) if width % columns == 0)
