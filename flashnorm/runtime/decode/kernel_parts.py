"""What steps and prompts tell the kernels of a spec's parts, and the join that both end a block with."""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.kernels.decode.join import join
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from flashnorm.runtime.decode.spec import Attention, Mlp, Norm, Rope


def joined(x: Tensor, branch: Tensor, by: Attention | Mlp) -> Tensor:
    """The residual stream `x` (rows, hidden) with the branch of a block in it."""
    out = torch.empty_like(x)
    join(branch, x, out, eps=eps_of(by.post_norm), gain=gain_of(by.post_norm), multiplier=by.multiplier)
    return out


def eps_of(norm: Norm | None) -> float | None:
    return None if norm is None else norm.eps


def gain_of(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.gain


def attention_shape(by: Attention) -> AttentionShape:
    return AttentionShape(
        by.heads,
        by.kv_heads,
        by.head_dim,
        by.scale,
        by.softcap,
        by.window,
        0 if by.rope is None else by.rope.cos.shape[1],
        by.rope is not None and by.rope.interleaved,
    )


def qk_norm(by: Attention) -> QkNorm:
    return QkNorm(eps_of(by.q_norm), gain_of(by.q_norm), eps_of(by.k_norm), gain_of(by.k_norm))


def tables(rope: Rope | None) -> tuple[Tensor, Tensor] | None:
    """cos and sin, (positions, rotary) fp32."""
    return None if rope is None else (rope.cos, rope.sin)
