"""Attention of one new token per row against the cache: QK-norm, rotation, the cache write and split-KV attention.

A row's cached tokens are divided among `splits` programs for each of its key heads; each program serves all the query
heads that share the key head. Among steps of as many rows, the division depends on the row's own position alone, and
the program that comes last joins the partial results in a fixed order, so that a row's result depends neither on its
company nor on who comes last.
A program's first block of keys and values comes before the wait for the new token's, where that is safe.
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
_KEY_BYTES = 16 << 10  # of the tokens that a program takes at a time, or half as many
_MANY_PROGRAMS = 264  # more than two for each multiprocessor: their registers have to make room
_FP32 = torch.float32
_DOT = 16  # the least rows and columns of a tensor-core product


@triton.jit
def _capped(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:  # cap · tanh(u), tanh u = 1 - 2 / (exp(2u) + 1)
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return scores


@triton.jit
def _seen(q, k, v, inside, best, total, mixed, scale, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """What a program has seen, and a block of tokens more."""
    scores = _capped(tl.dot(q, k.T, input_precision=PRECISION) * scale, softcap, CAPPED)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp(scores - highest[:, None])
    faded = tl.exp(best - highest)
    mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return highest, total * faded + tl.sum(weights, 1), mixed


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
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    h, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    # Perhaps before the wait: past the L1, which may hold what an earlier step had there.
    slot = tl.load(slots + row, cache_modifier=".cg")
    position = tl.load(positions + row, cache_modifier=".cg")
    g, d, t = tl.arange(0, G), tl.arange(0, D), tl.arange(0, BLOCK)
    channels = (d < HEAD_DIM)[None, :]
    base = slot * slot_stride + h.to(tl.int64) * head_stride
    start = position * 0
    if WINDOWED:
        start = tl.maximum(position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(position - start, SPLITS), BLOCK) * BLOCK
    start += split * share
    stop = tl.minimum(start + share, position)
    tokens = base + t[:, None] * HEAD_DIM + d[None, :]
    first = (start + t < stop)[:, None] & channels
    k = tl.load(keys + tokens + start * HEAD_DIM, mask=first, other=0.0, cache_modifier=".cg")
    v = tl.load(values + tokens + start * HEAD_DIM, mask=first, other=0.0, cache_modifier=".cg")
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    cos += position * table_stride
    sin += position * table_stride
    token = qkv + row.to(tl.int64) * qkv_stride
    own = (g < GROUP)[:, None]
    q = heads_of(
        token, ((h * GROUP + g) * HEAD_DIM)[:, None], own, q_gain, q_eps, cos, sin,
        HEAD_DIM, D, ROTARY, INTERLEAVED, Q_NORM, Q_GAIN,
    )  # fmt: skip
    q = q.to(keys.dtype.element_ty)
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
    if start < stop:
        best, total, mixed = _seen(
            q, k, v, start + t < stop, best, total, mixed, scale, softcap, CAPPED, PRECISION
        )  # fmt: skip
    for n in range(start + BLOCK, stop, BLOCK):
        inside = n + t < stop
        mask = inside[:, None] & channels
        k = tl.load(keys + tokens + n * HEAD_DIM, mask=mask, other=0.0)
        v = tl.load(values + tokens + n * HEAD_DIM, mask=mask, other=0.0)
        best, total, mixed = _seen(q, k, v, inside, best, total, mixed, scale, softcap, CAPPED, PRECISION)
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
            heads = row.to(tl.int64) * KV_HEADS * GROUP + head
            joined = _joined(partial, statistics, heads, g < GROUP, HEAD_DIM, D, SPLITS)
            target = out + row.to(tl.int64) * out_stride + head[:, None] * HEAD_DIM + d[None, :]
            tl.store(target, joined.to(out.dtype.element_ty), mask=own & channels)


@triton.jit
def _joined(partial, statistics, heads, own, HEAD_DIM: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """These heads' results from those of their splits; read past the L1, which knows nothing of other programs' stores.

    All heads together: one after the other, each would wait for loads of its own.
    """
    d, first = tl.arange(0, D), heads * SPLITS
    mask = own[:, None] & (d < HEAD_DIM)[None, :]
    at = first[:, None] + tl.arange(0, SPLITS)[None, :]
    highest = tl.max(tl.load(statistics + 2 * at, mask=own[:, None], other=0.0, cache_modifier=".cg"), 1)
    total = tl.zeros_like(highest)
    mixed = tl.zeros((heads.shape[0], D), tl.float32)
    for split in tl.static_range(SPLITS):
        at = first + split
        # The first split always holds a token; the others may be empty, with -inf and nothing in them.
        weight = tl.exp(tl.load(statistics + 2 * at, mask=own, other=0.0, cache_modifier=".cg") - highest)
        total += weight * tl.load(statistics + 2 * at + 1, mask=own, other=1.0, cache_modifier=".cg")
        seen = partial + at[:, None] * HEAD_DIM + d[None, :]
        mixed += weight[:, None] * tl.load(seen, mask=mask, other=0.0, cache_modifier=".cg")
    return mixed / total[:, None]


def block_of(keys: Tensor) -> int:
    """Tokens that a program takes at a time where there are few programs: a power of two.

    `keys`: (slots, kv_heads, max_length, head_dim).
    """
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
    early: bool = False,
) -> None:
    """Append one token per row to the cache and write its attention into `out` (rows, heads · head_dim).

    `qkv`: (rows, (heads + 2 kv_heads) · head_dim), q first; `keys`, `values`: (slots, kv_heads, max_length, head_dim),
    contiguous, of the same dtype; `slots`, `positions`: (rows,) int64, no slot twice unless nobody reads it; `tables`:
    cos and sin, (max_length, rotary) fp32. `splits`: a power of two. `arrived`: at least rows · kv_heads zeros, int32,
    which are zeros again afterwards; launches that may run at the same time must not share them. `early`: whatever
    wrote `qkv` let this kernel start only when all before itself was complete, so that the cache, `slots` and
    `positions` may be read before `qkv` is there.
    """
    rows = qkv.shape[0]
    partial = qkv.new_empty((rows, shape.heads, splits, shape.head_dim), dtype=_FP32)
    statistics = qkv.new_empty((rows, shape.heads, splits, 2), dtype=_FP32)
    cos, sin = tables if tables is not None else (partial, partial)
    group, pdl = shape.heads // shape.kv_heads, supports_pdl(qkv.device)
    block = block_of(keys)
    if rows * shape.kv_heads * splits > _MANY_PROGRAMS:
        block = max(_DOT, block // 2)
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
        BLOCK=block,
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
        EARLY=early,
        PDL=pdl,
        num_warps=4,
        num_stages=2,
        **launch_options(pdl),
    )
