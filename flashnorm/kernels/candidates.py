"""The configurations worth trying for a shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flashnorm.kernels.configs import Config, DeferredGemm, Fused, Gemv, NormLinear, Skinny, SplitK, Streamed, TmaGemm
from flashnorm.kernels.cuda.memory import (
    SHARED_MEMORY,
    skinny_bytes,
    streamed_bytes,
    streamed_slot,
    tiles_of,
    tma_gemm_bytes,
)

MULTIPROCESSORS = 132
_FOR_TRITON = 230_000  # its barriers and descriptors take the rest
_TILES_N = ((32, 0), (64, 0), (128, 0), (256, 0), (32, 16), (64, 32), (128, 64))


def candidates(m: int, k: int, n: int, *, gated: bool = False) -> list[Config]:
    """Every configuration to check and time for (m, k) x and (m, n) output in 16-bit floats, on a Hopper GPU."""
    found: list[Config] = []
    if m == 1:
        found += _streamed(k, gated)
    else:
        found += _tma_gemm(m, k, n, gated)
    if 1 < m <= 64:
        found += _skinny(m, k, gated)
    if gated:
        return list(dict.fromkeys([*found, *_norm_linear(m, k)]))
    if m == 1:
        found += _gemv(k)
    elif m <= 64:
        found += _split_k(m, k, n)
    if m > 1 and k <= 1024:
        found += _fused(m, k, n)
    if 64 <= m <= 256 and k <= 1024:
        found += _deferred_gemm(m, k, n)
    return list(dict.fromkeys([*found, *_norm_linear(m, k)]))


def _streamed(k: int, gated: bool) -> Iterator[Streamed]:
    """Rings of which one or two fit in a multiprocessor, and how they ask: how far ahead into the L2, at what pace, and
    how long before the last chunk the next kernel may start to fill its own."""
    for chunk_k, warps, rows, fill in product((1024, 2048, 4096), (4, 8), (1, 2, 4, 8), (48, 100, 200)):
        ring = Streamed(chunk_k, 1, warps, 1, 0, rows)
        slot = streamed_slot(ring, k)
        stages = (fill << 10) // slot
        wasted = chunk_k >= 2 * max(k, 1024) or (chunk_k == 1024 and k > 2048)
        if chunk_k % (256 * warps) or wasted or not (8192 <= slot <= 32768 and 2 <= stages <= 24):
            continue
        ring = replace(ring, stages=stages, on_the_way=max(2, min(stages, (64 << 10) // slot)))
        if streamed_bytes(ring, k, gated=gated) > SHARED_MEMORY:
            continue
        for ahead, pace, lead in product((0, 64 << 10), (0, 50), (None, 32 << 10, 96 << 10)):
            yield replace(ring, prefetch=ahead // slot, pace=pace, lead=lead and lead // slot)
        if fill <= 100:
            yield replace(ring, blocks=2, on_the_way=stages)


def _skinny(m: int, k: int, gated: bool) -> Iterator[Skinny]:
    """Rings of which one or two fit in a multiprocessor, and no more blocks for a K than it has steps."""
    for rows, split, stages in product((32, 64, 128), (1, 2, 4, 8), (4, 6, 8, 12)):
        config = Skinny(rows, split, stages)
        steps = -(-k // 64) // split
        divides = rows // (2 if gated else 1) % split == 0
        if divides and stages <= max(4, steps) and skinny_bytes(config, tiles_of(m)) <= SHARED_MEMORY:
            yield config


def _tma_gemm(m: int, k: int, n: int, gated: bool) -> Iterator[TmaGemm]:
    """Tiles that fill the multiprocessors in whole waves, as deep a ring as fits, and both places for the norm."""
    tiles = ((64, 1),) if m <= 64 else ((64, 1), (128, 2), (256, 2))
    widths = (16, 24, 32, 48, 56, 64, 72, 80, 96, 104, 112, 120, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    for (block_m, consumers), block_n in product(tiles, widths):
        if (gated and block_n % 16) or block_m * block_n > 128 * 256:
            continue
        stages = min(_deepest(TmaGemm(block_m, block_n, consumers), gated), max(2, -(-k // 64)))
        count = -(-m // block_m) * -(-n * (2 if gated else 1) // block_n)
        for norm, beside in (("inside", 0), ("beside", 4), ("beside", 8), ("beside", 16), ("beside", 32)):
            waves = -(-count // (MULTIPROCESSORS - beside))
            if stages < 2 or count / waves / MULTIPROCESSORS < (0.85 if m > 256 and k > 1024 else 0.45):
                continue
            for group, prefetch in ((8, 0), (16, 0)) if m > 256 else ((8, 0), (8, 4)):
                for rows in (8,) if norm == "inside" else (4, 8) if m <= 256 else (8, 32):
                    yield TmaGemm(block_m, block_n, consumers, stages, norm, beside, group, prefetch, rows)


def _deepest(tile: TmaGemm, gated: bool) -> int:
    """The most stages, up to 16, that fit in shared memory."""
    return max(n for n in range(17) if tma_gemm_bytes(replace(tile, stages=n), gated=gated) <= SHARED_MEMORY)


def _gemv(k: int) -> Iterator[Gemv]:
    for block_n, block_k, warps, prefetch in product(
        (1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8, 16), (0, 512, 1024)
    ):
        values = block_n * block_k // (32 * warps)  # per thread
        if 8 <= values <= 64 and block_k < 2 * k:
            yield Gemv(block_n, block_k, warps, prefetch)


def _split_k(m: int, k: int, n: int) -> Iterator[SplitK]:
    block_m = max(16, 1 << (m - 1).bit_length())
    for block_n, block_k, split, stages in product((64, 128), (64, 128, 256), (1, 2, 3, 4, 6, 8), (3, 4, 6)):
        memory = (block_n + block_m) * block_k * 2 * stages
        programs = -(-n // block_n) * split
        busy = k <= 1024 or (80 <= programs <= 420 and memory >= 60_000)
        if memory <= _FOR_TRITON and split * block_k <= k and busy:
            for prefetch, reduce_n in product((0, 256), (256, 512)):
                yield SplitK(block_n, block_k, split, stages, 4, reduce_n, prefetch)


def _fused(m: int, k: int, n: int) -> Iterator[Fused]:
    for block_m, block_n, block_k, stages in product((16, 32, 64), (16, 32, 64, 128), (64, 128), (3, 5)):
        programs = -(-m // block_m) * -(-n // block_n)
        if programs <= 12 * 132 and block_m < 2 * max(m, 16) and (block_m + block_n) * block_k * 2 * stages < 200_000:
            yield Fused(block_m, block_n, block_k, 4, stages, 0)
            yield Fused(block_m, block_n, block_k, 4, stages, 1024)


def _deferred_gemm(m: int, k: int, n: int) -> Iterator[DeferredGemm]:
    for block_m, (block_n, extra_n), block_k, stages, halves in product(
        (64, 128), _TILES_N, (64, 128), (3, 4, 6), (False, True)
    ):
        width = block_n + extra_n
        memory = (block_m + width) * block_k * 2 * stages + block_m * width * (1 if halves else 2)
        tiles = -(-m // block_m) * -(-n // width)
        if memory > _FOR_TRITON or (k > 1024 and not 40 <= tiles <= 1600) or (halves and (extra_n or block_n < 128)):
            continue
        warps = 8 if block_m * width > 128 * 128 else 4
        if k <= 1024:
            yield DeferredGemm(block_m, block_n, extra_n, block_k, 8, warps, stages, 1, 0, halves, True)
            yield DeferredGemm(block_m, block_n, extra_n, block_k, 8, 8, stages, 1, 0, halves, True)
        if m <= 256:
            for prefetch in (0, 256, 1024):
                yield DeferredGemm(block_m, block_n, extra_n, block_k, 8, warps, stages, 1, prefetch, halves)
        else:
            for group, wide in product((4, 8), {warps, 8}):
                yield DeferredGemm(block_m, block_n, extra_n, block_k, group, wide, stages, 4, 0, halves)


def _norm_linear(m: int, k: int) -> Iterator[NormLinear]:
    for (rows, warps), prefetch in product(((1, 2), (1, 4), (1, 8), (2, 8)), (0, 512, 1024)):
        for stream in (False, True):
            yield NormLinear(rows, warps, prefetch, stream)
