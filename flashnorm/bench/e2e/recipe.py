"""The gpt-fast recipe: a decoder in plain PyTorch whose whole step is compiled once and replayed as a CUDA graph.

The technique (PyTorch's "Accelerating Generative AI II: GPT, Fast", 2023): keys and values in tensors of fixed size, a
position that is data, one projection for q, k and v, attention as matmuls that the compiler may fuse, argmax inside of
the step, and `torch.compile(mode="reduce-overhead", fullgraph=True)`. Written here from that description, for models
laid out like Llama, with or without QK-norm. The weights are the model's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashnorm.errors import Unsupported
from flashnorm.runtime.merging import joined


class RecipeModel(nn.Module):
    """A model with a cache for `batch` sequences of `length` tokens that all stand at the same position."""

    embedding: Tensor
    gain: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    places: Tensor

    def __init__(self, model: Any, batch: int, length: int) -> None:
        """`model`: a Transformers causal LM. Raises `Unsupported` where a linear has a bias, which the recipe lacks."""
        super().__init__()
        inner, device = model.model, model.device
        if any(isinstance(part, nn.Linear) and part.bias is not None for part in model.modules()):
            raise Unsupported(f"the {type(model).__name__} has linears with a bias, which the recipe does not compute")
        _hold(self, embedding=inner.embed_tokens.weight, gain=inner.norm.weight, head=model.lm_head.weight)
        self.eps: float = inner.norm.variance_epsilon
        places = torch.arange(length, device=device)
        cos, sin = inner.rotary_emb(self.embedding[:1], position_ids=places[None])
        _hold(self, cos=cos[0], sin=sin[0], places=places)
        self.layers = nn.ModuleList(RecipeLayer(layer, batch, length) for layer in inner.layers)

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`tokens`: (batch, T) at `positions` (T,). Returns the next ones (batch, 1) and logits (batch, vocabulary)."""
        x = F.embedding(tokens, self.embedding)
        mask = self.places <= positions[:, None]
        rotation = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, rotation, mask, positions)
        logits = F.linear(rms_norm(x[:, -1], self.gain, self.eps), self.head)
        return logits.argmax(-1, keepdim=True), logits


class RecipeLayer(nn.Module):
    """One layer and its cache."""

    qkv: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    before_attention: Tensor
    before_mlp: Tensor
    keys: Tensor
    values: Tensor
    q_gain: Tensor | None
    k_gain: Tensor | None

    def __init__(self, layer: Any, batch: int, length: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        with torch.no_grad():
            _hold(self, qkv=joined(projections), out=attention.o_proj.weight)
        _hold(self, gate=mlp.gate_proj.weight, up=mlp.up_proj.weight, down=mlp.down_proj.weight)
        norms = layer.input_layernorm, layer.post_attention_layernorm
        _hold(self, before_attention=norms[0].weight, before_mlp=norms[1].weight)
        self.eps: float = norms[0].variance_epsilon
        for name in ("q", "k"):
            norm = getattr(attention, f"{name}_norm", None)
            self.register_buffer(f"{name}_gain", None if norm is None else norm.weight.detach(), persistent=False)
        self.head_dim: int = attention.head_dim
        self.heads, self.kv_heads = (len(weight) // self.head_dim for weight in projections[:2])
        cached = batch, self.kv_heads, length, self.head_dim
        _hold(self, keys=self.out.new_zeros(cached), values=self.out.new_zeros(cached))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, positions: Tensor) -> Tensor:
        x = x + self._attention(rms_norm(x, self.before_attention, self.eps), rotation, mask, positions)
        h = rms_norm(x, self.before_mlp, self.eps)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)

    def _attention(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, positions: Tensor) -> Tensor:
        batch, count, _ = x.shape
        heads = F.linear(x, self.qkv).view(batch, count, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q = q if self.q_gain is None else rms_norm(q, self.q_gain, self.eps)
        k = k if self.k_gain is None else rms_norm(k, self.k_gain, self.eps)
        self.keys[:, :, positions] = rotate(k, *rotation)
        self.values[:, :, positions] = v
        attended = self._attend(rotate(q, *rotation), mask)
        return F.linear(attended.transpose(1, 2).reshape(batch, count, -1), self.out)

    def _attend(self, q: Tensor, mask: Tensor) -> Tensor:
        """`q`, and what is returned: (batch, heads, T, head_dim). One token's heads of a group are the rows of one
        product, so that keys and values are read once and not once per head."""
        batch, group = len(q), self.heads // self.kv_heads
        if q.shape[2] == 1:
            grouped = q.view(batch, self.kv_heads, group, self.head_dim)
            return F.scaled_dot_product_attention(grouped, self.keys, self.values, mask).view_as(q)
        keys, values = (cached.repeat_interleave(group, 1) for cached in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, mask)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis as Llama computes it: in fp32, rounded to x's dtype before the gain."""
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` (batch, heads, T, head_dim) by `cos` and `sin` (T, head_dim); channel i turns with the
    one half of the channels further on."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def _hold(module: nn.Module, **tensors: Tensor) -> None:
    """As buffers: CUDA graphs read those where they are, while what is passed in is copied at every replay."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor.detach(), persistent=False)
