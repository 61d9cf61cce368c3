"""Heads as attention reads them, normed and rotated by their position; k and v go to the cache.

The slot is read from device memory, so that a captured launch serves any of them. Attention among the tokens of one
launch finds their keys and values in buffers of their own, wherever in the cache they went.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from flashnorm.kernels.launch import launch_options, supports_pdl


@triton.jit
def heads_of(
    pointer,
    rows,
    row_mask,
    gain,
    eps,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
):
    """Heads at `pointer` + `rows` (heads, 1), normed and rotated: (heads, D) fp32, zero beyond the head."""
    d = tl.arange(0, D)
    inside = row_mask & (d < HEAD_DIM)[None, :]
    x = tl.load(pointer + rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.full((x.shape[0],), 1.0, tl.float32)
    if NORM:
        scale = tl.math.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
        x = x * scale[:, None]
        if HAS_GAIN:
            x *= tl.load(gain + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    if ROTARY > 0:
        turns = d < 2 * ROTARY
        if INTERLEAVED:
            angle, partner, left = d // 2, d ^ 1, d % 2 == 0
        else:
            angle, partner, left = d % ROTARY, tl.where(d < ROTARY, d + ROTARY, d - ROTARY), d < ROTARY
        partner = tl.where(turns, partner, 0)
        other = tl.load(pointer + rows + partner[None, :], mask=row_mask & turns[None, :], other=0.0).to(tl.float32)
        other = other * scale[:, None]
        if HAS_GAIN:
            other *= tl.load(gain + partner, mask=turns, other=0.0).to(tl.float32)[None, :]
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        x = x * c[None, :] + other * tl.where(left, -s, s)[None, :]
    return x


@triton.jit
def _prepare_kernel(
    qkv,
    out,
    keys,
    values,
    own_keys,
    own_values,
    slots,
    cos,
    sin,
    q_gain,
    k_gain,
    qkv_stride,
    out_stride,
    slot_stride,
    head_stride,
    own_stride,
    table_stride,
    start,
    q_eps,
    k_eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_GAIN: tl.constexpr,
    K_NORM: tl.constexpr,
    K_GAIN: tl.constexpr,
    OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    h, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = start + row
    g, d = tl.arange(0, G), tl.arange(0, D)
    channels = (d < HEAD_DIM)[None, :]
    cos += position * table_stride
    sin += position * table_stride
    token = qkv + row * qkv_stride
    own = (g < GROUP)[:, None]
    q = heads_of(
        token, ((h * GROUP + g) * HEAD_DIM)[:, None], own, q_gain, q_eps, cos, sin,
        HEAD_DIM, D, ROTARY, INTERLEAVED, Q_NORM, Q_GAIN,
    )  # fmt: skip
    target = out + row * out_stride + ((h * GROUP + g) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(target, q.to(out.dtype.element_ty), mask=own & channels)
    one = tl.zeros((1, 1), tl.int32)
    k_at, v_at = (KV_HEADS * GROUP + h) * HEAD_DIM, (KV_HEADS * (GROUP + 1) + h) * HEAD_DIM
    k = heads_of(
        token, one + k_at, one == 0, k_gain, k_eps, cos, sin,
        HEAD_DIM, D, ROTARY, INTERLEAVED, K_NORM, K_GAIN,
    )  # fmt: skip
    v = tl.load(token + v_at + d[None, :], mask=channels, other=0.0)
    k = k.to(keys.dtype.element_ty)
    place = tl.load(slots) * slot_stride + h.to(tl.int64) * head_stride + position * HEAD_DIM + d[None, :]
    tl.store(keys + place, k, mask=channels)
    tl.store(values + place, v, mask=channels)
    if OWN:
        place = h.to(tl.int64) * own_stride + row * HEAD_DIM + d[None, :]
        tl.store(own_keys + place, k, mask=channels)
        tl.store(own_values + place, v, mask=channels)


def prepare_heads(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slot: Tensor,
    start: int,
    tables: tuple[Tensor, Tensor] | None,
    out: Tensor,
    shape: AttentionShape,
    norms: QkNorm,
    *,
    own: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write q into `out` (tokens, heads · head_dim), k and v to positions `start`, … of a slot of the cache.

    `qkv`: (tokens, (heads + 2 kv_heads) · head_dim), q first, rows contiguous; `keys`, `values`: (slots, kv_heads,
    max_length, head_dim), contiguous, of the same dtype; `slot`: (1,) int64, on the device; `tables`: cos and sin,
    (max_length, rotary) fp32. `own`: where k and v are written once more, each (kv_heads, tokens, head_dim),
    contiguous, of the same dtype.
    """
    tokens, group = len(qkv), shape.heads // shape.kv_heads
    cos, sin = tables if tables is not None else (qkv, qkv)
    own_keys, own_values = own if own is not None else (keys, values)
    pdl = supports_pdl(qkv.device)
    _prepare_kernel[(shape.kv_heads, tokens)](
        qkv,
        out,
        keys,
        values,
        own_keys,
        own_values,
        slot,
        cos,
        sin,
        norms.q_gain if norms.q_gain is not None else qkv,
        norms.k_gain if norms.k_gain is not None else qkv,
        qkv.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        own_keys.stride(0),
        cos.stride(0) if tables is not None else 0,
        start,
        norms.q_eps or 0.0,
        norms.k_eps or 0.0,
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        HEAD_DIM=shape.head_dim,
        G=triton.next_power_of_2(group),
        D=triton.next_power_of_2(shape.head_dim),
        ROTARY=shape.rotary,
        INTERLEAVED=shape.interleaved,
        Q_NORM=norms.q_eps is not None,
        Q_GAIN=norms.q_gain is not None,
        K_NORM=norms.k_eps is not None,
        K_GAIN=norms.k_gain is not None,
        OWN=own is not None,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
