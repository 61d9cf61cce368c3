"""The configurations worth trying for few rows by a weight in eight bits, on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashnorm.kernels.w8a8_configs import CodesGemv, CodesSplitK, Config, Library
from flashnorm.kernels.w8a8_dispatch import MATRIX_ROWS, MOST_ROWS

_FOR_TRITON = 230_000  # bytes of shared memory; its barriers and descriptors take the rest


def candidates(m: int, k: int, n: int) -> list[Config]:
    """Every configuration to check and time for (m, k) x and (n, k) codes."""
    found: list[Config] = [Library()]
    if m <= MOST_ROWS:
        found += _gemv(k)
    if 1 < m <= MATRIX_ROWS:
        found += _split_k(m, k, n)
    return list(dict.fromkeys(found))


def _gemv(k: int) -> Iterator[CodesGemv]:
    """8 to 64 values of x and 32 to 256 codes of the weight a thread, the row's width rounded up."""
    width = 1 << (k - 1).bit_length()
    for block_n, warps in product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        values = width // (32 * warps)
        if 8 <= values <= 64 and 32 <= block_n * values <= 256:
            yield CodesGemv(block_n, warps)


def _split_k(m: int, k: int, n: int) -> Iterator[CodesSplitK]:
    """Programs that fill the multiprocessors, one to three in each; shallow and deep rings of both step sizes."""
    block_m = max(16, 1 << (m - 1).bit_length())
    for block_n, split in product((64, 128), (1, 2, 3, 4, 6, 8)):
        programs = -(-n // block_n) * split
        if split > 2 if k <= 1024 else not 90 <= programs <= 400:
            continue
        for (block_k, stages), prefetch in product(((128, 4), (128, 8), (256, 3), (256, 5)), (0, 1024)):
            memory = (block_n + block_m) * block_k * stages
            if memory <= _FOR_TRITON and split * block_k <= k and block_k * (stages - 1) * split < 2 * k:
                yield CodesSplitK(block_n, block_k, split, stages, 4, 512, prefetch)
