"""What a decoder-only transformer computes, as data: enough to run it without its own code.

    x₀ = multiplier · E[token]
    x ← x + multiplier · post(W_o · attend(rope(q_norm(W_q norm(x) + b)), …) + b)      for every layer
    x ← x + multiplier · post(W_down · (act(W_gate norm(x)) ⊙ W_up norm(x)) + b)
    logits = cap · tanh(multiplier · W_head norm(x) / cap)

`reading.read_spec` finds these values in a model, and `proof` shows that they are all that it computes. Weights are the
model's own tensors, never copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x²) + eps) · gain over the last axis.

    `gain`: one plus already added where the model does so; in the model's dtype if that holds it exactly, else in fp32;
    None where it is 1.
    """

    gain: Tensor | None
    eps: float


@dataclass(frozen=True)
class Linear:
    """x Wᵀ + b. `weight`: (N, K), `bias`: (N,); either may be some rows of a larger tensor of the model."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Rope:
    """Rotation of the first 2R channels of q and k by a position's angles.

    `cos`, `sin`: (positions, R) fp32, any scaling of the model's included, one row for every position that will ever
    be used; layers that rotate alike share them. Channel i turns with i + R, or 2i with 2i + 1 where `interleaved`.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True)
class Attention:
    """Grouped-query causal attention with what surrounds it. q, k and v have `head_dim` channels per head."""

    norm: Norm | None
    q: Linear
    k: Linear
    v: Linear
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    rope: Rope | None
    scale: float
    softcap: float | None  # scores become cap · tanh(score / cap)
    window: int | None  # a token sees itself and so many tokens before it, less one
    out: Linear
    post_norm: Norm | None
    multiplier: float


@dataclass(frozen=True)
class Mlp:
    """down(act(gate) ⊙ up), or down(act(up)) where there is no gate. `activation`: a key of `reference.ACTIVATIONS`."""

    norm: Norm | None
    gate: Linear | None
    up: Linear
    activation: str
    down: Linear
    post_norm: Norm | None
    multiplier: float


@dataclass(frozen=True)
class Layer:
    attention: Attention
    mlp: Mlp


def linears_of(layer: Layer) -> tuple[Linear, ...]:
    """All linears of a layer, in the order in which a step reads them."""
    attention, mlp = layer.attention, layer.mlp
    gate = () if mlp.gate is None else (mlp.gate,)
    return attention.q, attention.k, attention.v, attention.out, *gate, mlp.up, mlp.down


@dataclass(frozen=True)
class Head:
    """From the last layer's output to logits."""

    norm: Norm | None
    linear: Linear
    multiplier: float
    softcap: float | None


@dataclass(frozen=True)
class Spec:
    """A whole model. `max_length`: for how many positions it was read."""

    embedding: Tensor  # (vocabulary, hidden)
    multiplier: float
    layers: tuple[Layer, ...]
    head: Head
    max_length: int

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocabulary(self) -> int:
        return self.head.linear.rows
