"""One step of some rows against the cache, through the decode kernels.

One row: the whole step is one kernel where the GPU and the model allow it, and else every weight is read by a
matrix-vector kernel that does all that surrounds the product. Several rows: the deferred operations, a kernel that ends
a block with the product and the residual, or the library's matmuls read every weight once for all rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.errors import Unsupported
from flashnorm.kernels.decode.attention import decode_attention, splits_for
from flashnorm.kernels.decode.begin import begin
from flashnorm.kernels.decode.matvec import matvec, tile_for
from flashnorm.kernels.decode.settle import settle
from flashnorm.kernels.decode.shapes import QkNorm
from flashnorm.kernels.dispatch import cuda_runs, problem_of, skinny_for
from flashnorm.kernels.surroundings import Surroundings
from flashnorm.runtime.decode.cache import Cache
from flashnorm.runtime.decode.kernel_parts import attention_shape, eps_of, gain_of, joined, qk_norm, tables
from flashnorm.runtime.decode.one_kernel import whole_step
from flashnorm.runtime.decode.packing import PackedLayer, Packing
from flashnorm.runtime.decode.prefill import activated, head_logits, normed_linear
from flashnorm.runtime.decode.spec import Attention, Linear, Mlp, Norm, Spec

if TYPE_CHECKING:
    from flashnorm.kernels.cuda.decode_step import DecodeStep


class KernelStep:
    """The same as `TorchStep`, on a device that Triton runs on; what it queues can be captured in a graph."""

    def __init__(self, spec: Spec, packing: Packing, cache: Cache, *, one_kernel: bool | None = None) -> None:
        """Raises `Unsupported` where `one_kernel` is asked for and the GPU or the model does not allow it.

        None: where both do.
        """
        self._spec, self._packing, self._cache = spec, packing, cache
        self._whole: DecodeStep | None = None
        if one_kernel is not False:
            try:
                self._whole = whole_step(spec, packing, cache)
            except Unsupported:
                if one_kernel:
                    raise
        self._norms = tuple(_in_fp32(qk_norm(layer.attention)) for layer in spec.layers)
        self._hopper = cuda_runs(spec.device)
        slots, most = cache.keys[0].shape[0], max(layer.attention.kv_heads for layer in spec.layers)
        self._arrived = torch.zeros(2 * slots * most, dtype=torch.int32, device=spec.device)  # rows: a power of two

    def __call__(self, slots: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor:
        if self._whole is not None and len(slots) == 1:
            return self._whole(slots, chosen, lengths)
        x, positions = begin(slots, chosen, lengths, self._spec.embedding.detach(), self._spec.multiplier)
        caches = zip(self._cache.keys, self._cache.values, strict=True)
        for layer, packed, cache, norms in zip(
            self._spec.layers, self._packing.layers, caches, self._norms, strict=True
        ):
            x = self._attention(x, layer.attention, packed, cache, norms, slots, positions)
            x = _mlp(x, layer.mlp, packed)
        return self._logits(x)

    def settled(self, slots: Tensor, chosen: Tensor, lengths: Tensor, following: Tensor, *, spare: int) -> Tensor:
        """The same, and the likeliest tokens appended: see `settle`. Logits (rows, vocabulary) fp32."""
        if self._whole is not None and len(slots) == 1:
            return self._whole.settled(slots, chosen, lengths, following, spare=spare)
        logits = self(slots, chosen, lengths)
        settle(logits, slots, chosen, lengths, following, spare=spare)
        return logits

    def _attention(
        self,
        x: Tensor,
        by: Attention,
        packed: PackedLayer,
        cache: tuple[Tensor, Tensor],
        norms: QkNorm,
        slots: Tensor,
        at: Tensor,
    ) -> Tensor:
        if len(x) == 1:
            qkv = _matvec(x, packed.qkv, packed.qkv.rows, _after(by.norm, bias=packed.qkv.bias))
        else:
            qkv = normed_linear(x, by.norm, packed.qkv)
        attended = x.new_empty((len(x), by.heads * by.head_dim))
        self._attend(qkv, cache, slots, at, tables(by.rope), attended, attention_shape(by), norms)
        return _output(x, attended, by.out, by)

    def _attend(self, qkv: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor, at: Tensor, *others: Any) -> None:
        """`others`: tables, out, shape and norms, as both kernels take them."""
        # Of several rows, qkv is an operation's or the library's, which lets the next kernel start after its own wait.
        early = len(qkv) > 1
        if early and self._hopper:
            from flashnorm.kernels.cuda.attention import attention, takes

            *_, shape, _norms = others
            if takes(qkv, cache[0], shape):
                attention(qkv, *cache, slots, at, *others, early=early)
                return
        splits = splits_for(len(qkv), cache[0])
        decode_attention(qkv, *cache, slots, at, *others, splits=splits, arrived=self._arrived, early=early)

    def _logits(self, x: Tensor) -> Tensor:
        head = self._spec.head
        around = _after(head.norm, bias=head.linear.bias, multiplier=head.multiplier)
        if len(x) > 1:
            few = _few_rows(x, head.linear, around, torch.float32)
            if few is None:
                return head_logits(x, head)
            logits = few
        else:
            logits = _matvec(x, head.linear, head.linear.rows, around, dtype=torch.float32)
        return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _in_fp32(norms: QkNorm) -> QkNorm:
    gains = {name: gain.float() for name in ("q_gain", "k_gain") if (gain := getattr(norms, name)) is not None}
    return replace(norms, **gains)


def _mlp(x: Tensor, by: Mlp, packed: PackedLayer) -> Tensor:
    if len(x) > 1:
        return _output(x, activated(x, by, packed.up), by.down, by)
    around = _after(by.norm, bias=packed.up.bias, activation=by.activation, gated=by.gate is not None)
    return _output(x, _matvec(x, packed.up, by.up.rows, around), by.down, by)


def _output(x: Tensor, inner: Tensor, by: Linear, block: Attention | Mlp) -> Tensor:
    """The residual stream after a block's last linear."""
    if block.post_norm is None:
        around = Surroundings(bias=by.bias, multiplier=block.multiplier, residual=x)
        ended = _matvec(inner, by, by.rows, around) if len(x) == 1 else _few_rows(inner, by, around, x.dtype)
        if ended is not None:
            return ended
    branch = (
        F.linear(inner, by.weight, by.bias) if len(x) > 1 else _matvec(inner, by, by.rows, Surroundings(bias=by.bias))
    )
    return joined(x, branch, block)


def _few_rows(x: Tensor, by: Linear, around: Surroundings, dtype: torch.dtype) -> Tensor | None:
    """The product and its surroundings in one kernel; None where that does not run or would be slower."""
    out = x.new_empty((len(x), by.rows), dtype=dtype)
    config = skinny_for(problem_of(x, by.weight, around.gain, out))
    if config is None or (by.bias is not None and by.bias.dtype != x.dtype):
        return None
    from flashnorm.kernels.cuda.skinny import skinny

    skinny(x, by.weight, out, around, config, static_weight=True)
    return out


def _matvec(x: Tensor, by: Linear, outputs: int, around: Surroundings, dtype: torch.dtype | None = None) -> Tensor:
    out = x.new_empty((len(x), outputs), dtype=dtype or x.dtype)
    matvec(x, by.weight, out, around, tile_for(outputs, x.shape[1], gated=around.gated))
    return out


def _after(norm: Norm | None, **others: Any) -> Surroundings:
    """A product that reads a normed row, with what else surrounds it."""
    return Surroundings(eps=eps_of(norm), gain=gain_of(norm), **others)
