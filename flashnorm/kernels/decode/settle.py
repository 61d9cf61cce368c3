"""The end of a greedy step: the likeliest token of each row becomes the one to append, and its sequence grows by one.

In place of half a dozen small launches. The first of several equal logits is taken, as `torch.argmax` may on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.launch import launch_options, supports_pdl

_PARTS = 32  # programs that share one row's vocabulary, a power of two
_BLOCK = 4096  # logits that a program asks for at once


@triton.jit
def _likeliest_kernel(
    logits, highs, indices, stride, V, SHARE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = part * SHARE + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, SHARE, BLOCK):
        value = tl.load(logits + row * stride + start + n, mask=start + n < V, other=float("-inf"))
        at = tl.where(value > best, start + n, at)
        best = tl.maximum(best, value)
    highest = tl.max(best, 0)
    tl.store(highs + row * PARTS + part, highest)
    tl.store(indices + row * PARTS + part, tl.min(tl.where(best == highest, at, V), 0))


@triton.jit
def _settle_kernel(highs, indices, slots, chosen, lengths, following, spare, V, PARTS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts = row * PARTS + tl.arange(0, PARTS)
    value, index = tl.load(highs + parts), tl.load(indices + parts)
    token = tl.min(tl.where(value == tl.max(value, 0), index, V), 0)
    token = tl.minimum(token, V - 1).to(tl.int64)  # where all is NaN there is no likeliest, but a token there must be
    slot = tl.load(slots + row)
    tl.store(following + row, token)
    tl.store(chosen + slot, token)
    tl.store(lengths + slot, tl.where(slot == spare, 0, tl.load(lengths + slot) + 1))


def settle(logits: Tensor, slots: Tensor, chosen: Tensor, lengths: Tensor, following: Tensor, *, spare: int) -> None:
    """chosen[slots] = following = argmax(logits); lengths[slots] += 1, but 0 for the slot `spare`.

    `logits`: (rows, vocabulary) fp32, rows contiguous; `slots`, `following`: (rows,) int64; `chosen`,
    `lengths`: (slots,) int64. No slot but `spare` twice.
    """
    rows, V = logits.shape
    pdl = supports_pdl(logits.device)
    highs = logits.new_empty((rows, _PARTS))
    indices = slots.new_empty((rows, _PARTS))
    share = triton.cdiv(triton.cdiv(V, _PARTS), _BLOCK) * _BLOCK
    _likeliest_kernel[(_PARTS, rows)](
        logits, highs, indices, logits.stride(0), V, share, _BLOCK, _PARTS, pdl, num_warps=4, **launch_options(pdl)
    )
    _settle_kernel[(rows,)](
        highs, indices, slots, chosen, lengths, following, spare, V, _PARTS, pdl,
        num_warps=1, **launch_options(pdl),
    )  # fmt: skip
