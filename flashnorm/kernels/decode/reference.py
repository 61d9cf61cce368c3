"""What each decode kernel computes, in plain torch, in fp32 (fp64 for fp64 operands) and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm

# In the order in which the kernels number them.
ACTIVATIONS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "gelu": F.gelu,
        "relu": F.relu,
        "relu2": lambda t: F.relu(t).square(),
    }
)


def wide(x: Tensor) -> Tensor:
    """In the dtype of arithmetic."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, eps: float | None, gain: Tensor | None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · gain over the last axis; x itself where `eps` is None."""
    if eps is None:
        return x
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if gain is None else normed * gain.to(x.dtype)


def matvec(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + multiplier · act(norm(x) Wᵀ + b), or · act(gate) ⊙ up. Returns (rows, N) unrounded."""
    products = rms_norm(wide(x), eps, gain) @ wide(weight).t()
    products = products if bias is None else products + wide(bias)
    if gated:
        gate, up = products.chunk(2, -1)
        products = ACTIVATIONS[activation or "silu"](gate) * up
    elif activation is not None:
        products = ACTIVATIONS[activation](products)
    return multiplier * products if residual is None else wide(residual) + multiplier * products


def join(x: Tensor, residual: Tensor, *, eps: float | None, gain: Tensor | None, multiplier: float) -> Tensor:
    """residual + multiplier · norm(x). Both (rows, N); returns that unrounded."""
    return wide(residual) + multiplier * rms_norm(wide(x), eps, gain)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the first 2R channels of x (..., head_dim) by angles whose `cos` and `sin` are (..., R)."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    left, right = (turning[..., ::2], turning[..., 1::2]) if interleaved else (turning[..., :half], turning[..., half:])
    turned = left * cos - right * sin, right * cos + left * sin
    return torch.cat((torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), rest), -1)


def attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    shape: AttentionShape,
    norms: QkNorm,
    *,
    stored: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """One new token per row against the cache, which is not changed; shapes as for `attention.decode_attention`.

    Queries and keys are rounded to `stored`, the cache's dtype. Returns the result (rows, heads · head_dim), and the
    rows' new keys and values (rows, kv_heads, head_dim).
    """
    heads = wide(qkv).unflatten(1, (-1, shape.head_dim))
    q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    q, k = rms_norm(q, norms.q_eps, norms.q_gain), rms_norm(k, norms.k_eps, norms.k_gain)
    if tables is not None:
        cos, sin = (table[positions][:, None].to(q.dtype) for table in tables)
        q, k = (rotate(part, cos, sin, interleaved=shape.interleaved) for part in (q, k))
    q, k = (part.to(stored).to(part.dtype) for part in (q, k))
    rows = []
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        first = 0 if shape.window is None else max(0, position - shape.window + 1)
        past = (wide(cache[slot, :, first:position]).to(q.dtype) for cache in (keys, values))
        own, mixed = (torch.cat((p, new[row][:, None]), 1) for p, new in zip(past, (k, v), strict=True))
        grouped = q[row].unflatten(0, (shape.kv_heads, -1))
        scores = grouped @ own.transpose(1, 2) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        rows.append((torch.softmax(scores, -1) @ mixed).flatten())
    return torch.stack(rows), k, v
