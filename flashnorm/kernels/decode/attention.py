"""Attention of one new token per row against the cache: QK-norm, rotation, the cache write and split-KV attention.

A row's cached tokens are divided among `splits` programs for each of its key heads; each program serves all the query
heads that share the key head. The division depends on the row's own position alone, and the program that comes last
joins the partial results in a fixed order, so that a row's result depends neither on its company nor on who comes last.
The program of the first split also takes the new token, from registers, and writes it to the cache; no program of the
same launch reads that place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.decode.heads import heads_of
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from flashnorm.kernels.launch import launch_options, supports_pdl

_MAX_SPLITS = 32
_PROGRAMS = 512  # some four per multiprocessor of a large GPU
_KEY_BYTES = 16 << 10  # of the tokens that a program takes at a time
_FP32 = torch.float32
_DOT = 16  # the least rows and columns of a tensor-core product


@triton.jit
def _capped(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:  # cap · tanh(u), tanh u = 1 - 2 / (exp(2u) + 1)
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return scores


@triton.jit
def _attention_kernel(
    qkv,
    keys,
    values,
    slots,
    positions,
    cos,
    sin,
    q_gain,
    k_gain,
    out,
    partial,
    statistics,
    arrived,
    qkv_stride,
    slot_stride,
    head_stride,
    table_stride,
    out_stride,
    q_eps,
    k_eps,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_GAIN: tl.constexpr,
    K_NORM: tl.constexpr,
    K_GAIN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    h, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot, position = tl.load(slots + row), tl.load(positions + row)
    g, d, t = tl.arange(0, G), tl.arange(0, D), tl.arange(0, BLOCK)
    channels = (d < HEAD_DIM)[None, :]
    cos += position * table_stride
    sin += position * table_stride
    token = qkv + row.to(tl.int64) * qkv_stride
    own = (g < GROUP)[:, None]
    q = heads_of(
        token, ((h * GROUP + g) * HEAD_DIM)[:, None], own, q_gain, q_eps, cos, sin,
        HEAD_DIM, D, ROTARY, INTERLEAVED, Q_NORM, Q_GAIN,
    )  # fmt: skip
    q = q.to(keys.dtype.element_ty)
    base = slot * slot_stride + h.to(tl.int64) * head_stride
    best = tl.full((G,), float("-inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    mixed = tl.zeros((G, D), tl.float32)
    if split == 0:
        one = tl.zeros((1, 1), tl.int32)
        k_at, v_at = (KV_HEADS * GROUP + h) * HEAD_DIM, (KV_HEADS * (GROUP + 1) + h) * HEAD_DIM
        k_new = heads_of(
            token, one + k_at, one == 0, k_gain, k_eps, cos, sin,
            HEAD_DIM, D, ROTARY, INTERLEAVED, K_NORM, K_GAIN,
        ).to(keys.dtype.element_ty)  # fmt: skip
        v_new = tl.load(token + v_at + d[None, :], mask=channels, other=0.0)
        place = base + position * HEAD_DIM + d[None, :]
        tl.store(keys + place, k_new, mask=channels)
        tl.store(values + place, v_new, mask=channels)
        best = _capped(tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale, softcap, CAPPED)
        total += 1.0
        mixed += v_new.to(tl.float32)
    first = position * 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(position - first, SPLITS), BLOCK) * BLOCK
    start = first + split * share
    stop = tl.minimum(start + share, position)
    for n in range(start, stop, BLOCK):
        inside = n + t < stop
        place = base + (n + t)[:, None] * HEAD_DIM + d[None, :]
        mask = inside[:, None] & channels
        k = tl.load(keys + place, mask=mask, other=0.0)
        v = tl.load(values + place, mask=mask, other=0.0)
        scores = _capped(tl.dot(q, k.T, input_precision=PRECISION) * scale, softcap, CAPPED)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        faded = tl.exp(best - highest)
        total = total * faded + tl.sum(weights, 1)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = highest
    head = h * GROUP + g
    if SPLITS == 1:
        target = out + row.to(tl.int64) * out_stride + head[:, None] * HEAD_DIM + d[None, :]
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=own & channels)
    else:
        at = (row.to(tl.int64) * KV_HEADS * GROUP + head) * SPLITS + split
        tl.store(partial + at[:, None] * HEAD_DIM + d[None, :], mixed, mask=own & channels)
        tl.store(statistics + 2 * at, best, mask=g < GROUP)
        tl.store(statistics + 2 * at + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # all of this program's threads have stored
        mine = arrived + row * KV_HEADS + h
        if tl.atomic_add(mine, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(mine, 0)  # for the next launch
            first_head = row.to(tl.int64) * KV_HEADS * GROUP + h * GROUP
            target = out + row.to(tl.int64) * out_stride + h * GROUP * HEAD_DIM
            for i in range(GROUP):
                joined = _joined(partial, statistics, first_head + i, HEAD_DIM, D, SPLITS)
                tl.store(target + i * HEAD_DIM + d, joined.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _joined(partial, statistics, head, HEAD_DIM: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """One head's result from those of its splits; read past the L1, which knows nothing of other programs' stores."""
    d = tl.arange(0, D)
    at = head * SPLITS + tl.arange(0, SPLITS)
    best = tl.load(statistics + 2 * at, cache_modifier=".cg")
    total = tl.load(statistics + 2 * at + 1, cache_modifier=".cg")
    # The first split always holds a token; the others may be empty, with -inf and nothing in them.
    weights = tl.exp(best - tl.max(best, 0))
    mask = (d < HEAD_DIM)[None, :]
    mixed = tl.load(partial + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(mixed * weights[:, None], 0) / tl.sum(total * weights, 0)


def block_of(keys: Tensor) -> int:
    """Tokens that a program takes at a time, a power of two; `keys`: (slots, kv_heads, max_length, head_dim)."""
    width = max(_DOT, triton.next_power_of_2(keys.shape[3]))
    return max(_DOT, min(128, _KEY_BYTES // (width * keys.element_size())))


def splits_for(rows: int, keys: Tensor) -> int:
    """A power of two: enough programs to fill a large GPU, each with a block of tokens at least once in a full slot.

    `keys`: (slots, kv_heads, max_length, head_dim).
    """
    _, kv_heads, max_length, _ = keys.shape
    wanted = min(_PROGRAMS // (rows * kv_heads), triton.cdiv(max_length, block_of(keys)), _MAX_SPLITS)
    return 1 << (max(1, wanted).bit_length() - 1)


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    out: Tensor,
    shape: AttentionShape,
    norms: QkNorm,
    *,
    splits: int,
    arrived: Tensor,
) -> None:
    """Append one token per row to the cache and write its attention into `out` (rows, heads · head_dim).

    `qkv`: (rows, (heads + 2 kv_heads) · head_dim), q first; `keys`, `values`: (slots, kv_heads, max_length, head_dim),
    contiguous, of the same dtype; `slots`, `positions`: (rows,) int64, no slot twice unless nobody reads it; `tables`:
    cos and sin, (max_length, rotary) fp32. `splits`: a power of two. `arrived`: at least rows · kv_heads zeros, int32,
    which are zeros again afterwards; launches that may run at the same time must not share them.
    """
    rows = qkv.shape[0]
    partial = qkv.new_empty((rows, shape.heads, splits, shape.head_dim), dtype=_FP32)
    statistics = qkv.new_empty((rows, shape.heads, splits, 2), dtype=_FP32)
    cos, sin = tables if tables is not None else (partial, partial)
    group, pdl = shape.heads // shape.kv_heads, supports_pdl(qkv.device)
    width = max(_DOT, triton.next_power_of_2(shape.head_dim))
    _attention_kernel[(shape.kv_heads, splits, rows)](
        qkv,
        keys,
        values,
        slots,
        positions,
        cos,
        sin,
        norms.q_gain if norms.q_gain is not None else qkv,
        norms.k_gain if norms.k_gain is not None else qkv,
        out,
        partial,
        statistics,
        arrived,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        cos.stride(0) if tables is not None else 0,
        out.stride(0),
        norms.q_eps or 0.0,
        norms.k_eps or 0.0,
        shape.scale,
        shape.softcap or 1.0,
        shape.window or 0,
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        HEAD_DIM=shape.head_dim,
        G=max(_DOT, triton.next_power_of_2(group)),
        D=width,
        BLOCK=block_of(keys),
        SPLITS=splits,
        ROTARY=shape.rotary,
        INTERLEAVED=shape.interleaved,
        WINDOWED=shape.window is not None,
        CAPPED=shape.softcap is not None,
        Q_NORM=norms.q_eps is not None,
        Q_GAIN=norms.q_gain is not None,
        K_NORM=norms.k_eps is not None,
        K_GAIN=norms.k_gain is not None,
        PRECISION="ieee" if qkv.dtype == _FP32 else "tf32",  # of fp32 operands
        PDL=pdl,
        num_warps=4,
        num_stages=2,
        **launch_options(pdl),
    )
