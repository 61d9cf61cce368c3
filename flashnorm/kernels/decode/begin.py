"""The beginning of a step: each row's token and position, and the embedding, in place of three gathers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.launch import launch_options, supports_pdl

_BLOCK = 1024


@triton.jit
def _begin_kernel(
    slots, chosen, lengths, embedding, positions, x, embedding_stride, multiplier,
    K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row)
    token = tl.load(chosen + slot)
    if part == 0:
        tl.store(positions + row, tl.load(lengths + slot))
    k = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(embedding + token * embedding_stride + k, mask=k < K, other=0.0).to(tl.float32) * multiplier
    tl.store(x + row * K + k, values.to(x.dtype.element_ty), mask=k < K)


def begin(
    slots: Tensor, chosen: Tensor, lengths: Tensor, embedding: Tensor, multiplier: float
) -> tuple[Tensor, Tensor]:
    """x = multiplier · embedding[chosen[slots]], rounded to its dtype, (rows, K), and positions = lengths[slots].

    `slots`: (rows,), `chosen`, `lengths`: (slots,), all int64; `embedding`: (vocabulary, K), rows contiguous.
    """
    rows, K = len(slots), embedding.shape[1]
    positions, x = slots.new_empty(rows), embedding.new_empty((rows, K))
    pdl = supports_pdl(slots.device)
    _begin_kernel[(triton.cdiv(K, _BLOCK), rows)](
        slots, chosen, lengths, embedding, positions, x, embedding.stride(0), multiplier,
        K, _BLOCK, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return x, positions
