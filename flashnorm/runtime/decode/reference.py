"""The spec interpreted in plain torch: the oracle of the proof, of the kernels, and the step on any device.

Everything computes in the dtype of its input `x`, to which weights are cast where they are used; x is (rows, tokens,
hidden), positions are (rows, tokens).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.kernels.decode.reference import ACTIVATIONS, rms_norm
from flashnorm.kernels.decode.reference import rotate as turn
from flashnorm.runtime.decode.spec import Attention, Head, Linear, Mlp, Norm, Rope


def norm(x: Tensor, by: Norm | None) -> Tensor:
    """RMSNorm over the last axis; x itself where there is none."""
    return x if by is None else rms_norm(x, by.eps, by.gain)


def linear(x: Tensor, by: Linear) -> Tensor:
    """x Wᵀ + b: (..., K) to (..., N)."""
    return F.linear(x, by.weight.to(x.dtype), None if by.bias is None else by.bias.to(x.dtype))


def rotate(x: Tensor, rope: Rope | None, positions: Tensor) -> Tensor:
    """Apply the rotation of each token's position to x: (rows, tokens, heads, head_dim)."""
    if rope is None:
        return x
    cos, sin = (table[positions].to(x.dtype).unsqueeze(2) for table in (rope.cos, rope.sin))
    return turn(x, cos, sin, interleaved=rope.interleaved)


def project(x: Tensor, by: Attention, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (rows, tokens, heads, head_dim), k and v (rows, tokens, kv_heads, head_dim), as attention reads them."""
    normed = norm(x, by.norm)
    q, k, v = (linear(normed, part).unflatten(-1, (-1, by.head_dim)) for part in (by.q, by.k, by.v))
    return rotate(norm(q, by.q_norm), by.rope, positions), rotate(norm(k, by.k_norm), by.rope, positions), v


def attend(q: Tensor, keys: Tensor, values: Tensor, by: Attention, positions: Tensor) -> Tensor:
    """softmax(cap(scale · q kᵀ)) v over the keys that each token may see: those at 0 … its position, in the window.

    `q`: (rows, tokens, heads, head_dim); `keys`, `values`: (rows, kv_heads, length, head_dim), by position. Returns
    (rows, tokens, heads · head_dim). What lies at positions beyond may be anything, a NaN too.
    """
    at = torch.arange(keys.shape[2], device=q.device)
    behind = positions[..., None] - at  # (rows, tokens, length)
    seen = (behind >= 0) if by.window is None else (behind >= 0) & (behind < by.window)
    reachable = seen.any(1)[:, None, :, None]
    keys, values = (torch.where(reachable, t, 0.0).to(q.dtype) for t in (keys, values))
    grouped = q.transpose(1, 2).unflatten(1, (by.kv_heads, -1))  # (rows, kv_heads, group, tokens, head_dim)
    scores = grouped @ keys[:, :, None].transpose(-1, -2) * by.scale
    if by.softcap is not None:
        scores = by.softcap * torch.tanh(scores / by.softcap)
    weights = torch.softmax(scores.masked_fill(~seen[:, None, None], -torch.inf), -1)
    return (weights @ values[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2)


def join(x: Tensor, branch: Tensor, by: Attention | Mlp) -> Tensor:
    """The residual stream after a branch: x + multiplier · post(branch)."""
    return x + by.multiplier * norm(branch, by.post_norm)


def attention_block(x: Tensor, by: Attention, positions: Tensor, *, start: int = 0) -> Tensor:
    """One whole attention sublayer over a sequence without a cache; its position 0 counts as `start` in rotations."""
    q, k, v = project(x, by, positions + start)
    return join(x, linear(attend(q, k.transpose(1, 2), v.transpose(1, 2), by, positions), by.out), by)


def activated(x: Tensor, by: Mlp) -> Tensor:
    """act(gate) ⊙ up, or act(up): what the down projection reads."""
    normed = norm(x, by.norm)
    up, act = linear(normed, by.up), ACTIVATIONS[by.activation]
    return act(up) if by.gate is None else act(linear(normed, by.gate)) * up


def mlp_block(x: Tensor, by: Mlp) -> Tensor:
    """One whole MLP sublayer."""
    return join(x, linear(activated(x, by), by.down), by)


def logits(x: Tensor, by: Head) -> Tensor:
    """Logits (..., vocabulary) of the last layer's output."""
    raw = by.multiplier * linear(norm(x, by.norm), by.linear)
    return raw if by.softcap is None else by.softcap * torch.tanh(raw / by.softcap)
