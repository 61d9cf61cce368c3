"""Many tokens of one sequence at once, through the deferred operations and the library's matmuls and attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.kernels import rms_linear, rms_swiglu_linear
from flashnorm.kernels.reference import ACTIVATIONS as GATED_ACTIVATIONS
from flashnorm.runtime.decode import reference
from flashnorm.runtime.decode.cache import Cache
from flashnorm.runtime.decode.first_chunk import FirstChunk
from flashnorm.runtime.decode.packing import PackedLayer, Packing
from flashnorm.runtime.decode.spec import Attention, Head, Linear, Mlp, Norm, Spec
from flashnorm.runtime.decode.step import embed, wide

CHUNK = 2048  # tokens at once: enough to fill a GPU, and a bound on the memory that a long prompt takes


@dataclass(frozen=True)
class _Place:
    """Where some tokens of a prompt go: positions `at` (tokens,) of `slot`, (1,) int64, both on the device.

    `start`: the first of the positions; `earlier`: the slot's number, where tokens before them lie in its cache.
    """

    slot: Tensor
    at: Tensor
    start: int = 0
    earlier: int | None = None


class Prefill:
    """Fills a slot's cache with a prompt and gives the logits after it."""

    def __init__(
        self,
        spec: Spec,
        packing: Packing,
        cache: Cache,
        *,
        chunk: int = CHUNK,
        kernels: bool = False,
        capture: bool = False,
    ) -> None:
        """`kernels`: what surrounds the matmuls and the attention goes through kernels, on a device that has Triton.

        `capture`: a prompt's first chunk is replayed from a CUDA graph. The cache's last slot is one that nobody reads.
        """
        self._chunk, self._pass = chunk, _Pass(spec, packing, cache, kernels=kernels)
        slots, _, max_length, _ = cache.keys[0].shape
        self._first = FirstChunk(self._pass.first, min(chunk, max_length), slots - 1, spec.device, capture=capture)

    def __call__(self, ids: Tensor, slot: int) -> Tensor:
        """`ids`: (tokens,) int64 on the device, written to positions 0 … tokens - 1. Returns (vocabulary,) fp32.

        Positions after these, within the slot, may be written too.
        """
        logits = self._first.run(ids[: self._chunk], slot)  # of a longer prompt, nobody reads these
        for start in range(self._chunk, len(ids), self._chunk):
            logits = self._pass.later(ids[start : start + self._chunk], slot, start)
        return logits

    def close(self) -> None:
        """Drop the graphs and their pool."""
        self._first.close()


class _Pass:
    """Some tokens of a prompt through all layers, which write their keys and values to the cache."""

    def __init__(self, spec: Spec, packing: Packing, cache: Cache, *, kernels: bool) -> None:
        self._spec, self._packing, self._cache, self._kernels = spec, packing, cache, kernels

    def first(self, ids: Tensor, slot: Tensor, last: Tensor) -> Tensor:
        """A prompt's first tokens: see `first_chunk.Forward`."""
        x = self._forward(ids, _Place(slot, torch.arange(len(ids), device=ids.device)))
        return head_logits(x[last], self._spec.head)[0]

    def later(self, ids: Tensor, slot: int, start: int) -> Tensor:
        """Those at positions `start`, …: logits (vocabulary,) fp32 after the last of `ids` (tokens,)."""
        at = torch.arange(start, start + len(ids), device=ids.device)
        x = self._forward(ids, _Place(ids.new_full((1,), slot), at, start, slot))
        return head_logits(x[-1:], self._spec.head)[0]

    def _forward(self, ids: Tensor, place: _Place) -> Tensor:
        x = embed(self._spec, ids)
        caches = zip(self._cache.keys, self._cache.values, strict=True)
        for layer, packed, cache in zip(self._spec.layers, self._packing.layers, caches, strict=True):
            x = self._attention(x, layer.attention, packed, cache, place)
            inner = activated(x, layer.mlp, packed.up)
            x = self._joined(x, F.linear(inner, layer.mlp.down.weight, layer.mlp.down.bias), layer.mlp)
        return x

    def _attention(
        self, x: Tensor, by: Attention, packed: PackedLayer, cache: tuple[Tensor, Tensor], place: _Place
    ) -> Tensor:
        """`x`: (tokens, hidden); `cache`: keys and values (slots, kv_heads, max_length, head_dim)."""
        q, keys, values = self._prepared(normed_linear(x, by.norm, packed.qkv), by, cache, place)
        if place.earlier is not None:
            keys, values = (stored[place.earlier, :, : place.start + len(x)] for stored in cache)
        attended = attend(q, keys, values, by, place.at, place.start)
        return self._joined(x, F.linear(attended, by.out.weight, by.out.bias), by)

    def _prepared(
        self, qkv: Tensor, by: Attention, cache: tuple[Tensor, Tensor], place: _Place
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (tokens, heads, head_dim), normed and rotated, and k, likewise, and v, both (kv_heads, tokens, head_dim).

        k and v are then in the cache, too.
        """
        if self._kernels:
            from flashnorm.kernels.decode.heads import prepare_heads
            from flashnorm.runtime.decode.kernel_parts import attention_shape, qk_norm, tables

            q = qkv.new_empty((len(qkv), by.heads * by.head_dim))
            k, v = (qkv.new_empty((by.kv_heads, len(qkv), by.head_dim)) for _ in range(2))
            shape, norms = attention_shape(by), qk_norm(by)
            prepare_heads(qkv, *cache, place.slot, place.start, tables(by.rope), q, shape, norms, own=(k, v))
            return q.unflatten(-1, (by.heads, by.head_dim)), k, v
        q, k, v = qkv.unflatten(-1, (-1, by.head_dim)).split((by.heads, by.kv_heads, by.kv_heads), dim=1)
        q, k = (
            reference.rotate(reference.norm(wide(part), norm)[None], by.rope, place.at[None])[0].to(qkv.dtype)
            for part, norm in ((q, by.q_norm), (k, by.k_norm))
        )
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        for stored, new in zip(cache, (k, v), strict=True):
            stored[place.slot, :, place.start : place.start + len(qkv)] = new
        return q, k, v

    def _joined(self, x: Tensor, branch: Tensor, by: Attention | Mlp) -> Tensor:
        if self._kernels:
            from flashnorm.runtime.decode.kernel_parts import joined

            return joined(x, branch, by)
        return reference.join(wide(x), wide(branch), by).to(x.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, by: Attention, at: Tensor, start: int) -> Tensor:
    """Attention of tokens at positions `at`: `q` (tokens, heads, head_dim); returns (tokens, heads · head_dim)."""
    if by.softcap is not None:  # the library's attention has no cap
        return reference.attend(wide(q)[None], keys[None], values[None], by, at[None])[0].to(q.dtype)
    whole = start == 0 and (by.window is None or by.window >= keys.shape[1])
    mask = None
    if not whole:
        behind = at[:, None] - torch.arange(keys.shape[1], device=q.device)
        mask = (behind >= 0) & (behind < (by.window or keys.shape[1]))
    out = F.scaled_dot_product_attention(
        q[None].transpose(1, 2),
        keys[None],
        values[None],
        mask,
        is_causal=whole,
        scale=by.scale,
        enable_gqa=by.heads != by.kv_heads,
    )
    return out[0].transpose(0, 1).flatten(1)  # a view where the result is laid out as q is


def activated(x: Tensor, by: Mlp, up: Linear) -> Tensor:
    """act(gate) ⊙ up, or act(up), from the packed linear `up`: (rows, inner) in x's dtype."""
    if by.gate is not None and up.bias is None and by.activation in GATED_ACTIVATIONS and _defers(by.norm, x):
        assert by.norm is not None
        return rms_swiglu_linear(
            x, up.weight, by.norm.eps, gain=by.norm.gain, activation=by.activation, static_weight=True
        )
    products = wide(normed_linear(x, by.norm, up))
    act = reference.ACTIVATIONS[by.activation]
    if by.gate is None:
        return act(products).to(x.dtype)
    gate, value = products.chunk(2, -1)
    return (act(gate) * value).to(x.dtype)


def normed_linear(x: Tensor, norm: Norm | None, by: Linear) -> Tensor:
    """norm(x) Wᵀ + b in x's dtype, with the norm deferred where the operation takes its gain as it is."""
    if norm is not None and _defers(norm, x):
        return rms_linear(x, by.weight, norm.eps, gain=norm.gain, bias=by.bias, static_weight=True)
    return F.linear(reference.norm(wide(x), norm).to(x.dtype), by.weight, by.bias)


def _defers(norm: Norm | None, x: Tensor) -> bool:
    """A gain that only fp32 holds, such as one plus a small weight, would not be the same in x's dtype."""
    return norm is not None and (norm.gain is None or norm.gain.dtype == x.dtype)


def head_logits(x: Tensor, by: Head) -> Tensor:
    """Logits (rows, vocabulary) fp32 of the last layer's output (rows, hidden), without an fp32 copy of the head."""
    raw = normed_linear(x, by.norm, by.linear).float()
    raw = raw if by.multiplier == 1 else raw * by.multiplier
    return raw if by.softcap is None else by.softcap * torch.tanh(raw / by.softcap)
