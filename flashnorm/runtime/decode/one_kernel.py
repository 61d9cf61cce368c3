"""A spec for the kernel that runs a whole step of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.cache import Cache
from flashnorm.runtime.decode.packing import PackedLayer, Packing
from flashnorm.runtime.decode.spec import Layer, Linear, Norm, Rope, Spec

if TYPE_CHECKING:
    from flashnorm.kernels.cuda.decode_step import DecodeStep, Ends, LayerData, NormData
    from flashnorm.kernels.decode.shapes import StepShape

_INSTALL = "pip install 'flashnorm[gpu]'"


def whole_step(spec: Spec, packing: Packing, cache: Cache) -> DecodeStep:
    """The whole step as one kernel. Raises `Unsupported` where that cannot be."""
    shape = shape_of(spec)
    try:
        from flashnorm.kernels.cuda.decode_step import DecodeStep, refusal
    except ImportError as error:
        raise Unsupported(f"a step as one kernel needs NVIDIA's bindings ({error}); {_INSTALL}") from error
    why = refusal(shape, spec.device) or _not_in_rows(spec, packing)
    if why is not None:
        raise Unsupported(f"a step as one kernel: {why}")
    caches = zip(cache.keys, cache.values, strict=True)
    layers = [
        layer_data(layer, packed, keys, values)
        for layer, packed, (keys, values) in zip(spec.layers, packing.layers, caches, strict=True)
    ]
    return DecodeStep(shape, layers, _ends(spec))


def shape_of(spec: Spec) -> StepShape:
    """What all layers have in common, as the kernel is compiled for it. Raises `Unsupported` where they differ."""
    from flashnorm.kernels.decode.shapes import StepShape

    first = spec.layers[0]
    turning = next((layer.attention.rope for layer in spec.layers if layer.attention.rope is not None), None)
    for index, layer in enumerate(spec.layers):
        rope = layer.attention.rope
        alike = rope is None or (turning is not None and _turning(rope) == _turning(turning))
        if _common(layer) != _common(first) or not alike:
            raise Unsupported(f"a step as one kernel: layer {index} has another shape than the first")
    heads, kv_heads, head_dim, inner, gated, activation, capped = _common(first)
    before = [norm for layer in spec.layers for norm in (layer.attention.norm, layer.mlp.norm)]
    gains = any(norm is not None and norm.gain is not None for norm in (*before, spec.head.norm))
    sizes = spec.hidden, inner, heads, kv_heads, head_dim
    rotation = (0, False) if turning is None else _turning(turning)
    return StepShape(*sizes, *rotation, gated, activation, capped, gains, spec.dtype)


def layer_data(layer: Layer, packed: PackedLayer, keys: Tensor, values: Tensor) -> LayerData:
    """What the kernel reads of one layer. `keys`, `values`: its cache, (slots, kv_heads, max_length, head_dim)."""
    from flashnorm.kernels.cuda.decode_step import LayerData

    a, m = layer.attention, layer.mlp
    return LayerData(
        packed.qkv.weight.detach(),
        a.out.weight.detach(),
        packed.up.weight.detach(),
        m.down.weight.detach(),
        keys,
        values,
        a.scale,
        biases=tuple(_wide(part.bias) for part in (packed.qkv, a.out, packed.up, m.down)),  # type: ignore[arg-type]
        norms=(_norm(a.norm), _norm(m.norm)),
        post_norms=(_norm(a.post_norm), _norm(m.post_norm)),
        multipliers=(a.multiplier, m.multiplier),
        q_norm=_norm(a.q_norm),
        k_norm=_norm(a.k_norm),
        angles=(None, None) if a.rope is None else (a.rope.cos.contiguous(), a.rope.sin.contiguous()),
        softcap=a.softcap,
        window=a.window,
    )


def _common(layer: Layer) -> tuple[int, int, int, int, bool, str, bool]:
    a, m = layer.attention, layer.mlp
    return a.heads, a.kv_heads, a.head_dim, m.up.rows, m.gate is not None, m.activation, a.softcap is not None


def _turning(rope: Rope) -> tuple[int, bool]:
    return rope.cos.shape[1], rope.interleaved


def _ends(spec: Spec) -> Ends:
    from flashnorm.kernels.cuda.decode_step import Ends

    head = spec.head
    return Ends(
        spec.embedding.detach(),
        head.linear.weight.detach(),
        _norm(head.norm),
        _wide(head.linear.bias),
        spec.multiplier,
        head.multiplier,
        head.softcap,
    )


def _not_in_rows(spec: Spec, packing: Packing) -> str | None:
    """Bulk copies need matrices that are contiguous and begin at a multiple of 16 bytes."""
    linears: list[Linear] = [spec.head.linear]
    for layer, packed in zip(spec.layers, packing.layers, strict=True):
        linears += [packed.qkv, layer.attention.out, packed.up, layer.mlp.down]
    for matrix in (spec.embedding, *(linear.weight for linear in linears)):
        if not matrix.is_contiguous() or matrix.data_ptr() % 16:
            return f"a weight of shape {tuple(matrix.shape)} is not contiguous, or begins at an odd address"
    return None


def _norm(norm: Norm | None) -> NormData:
    from flashnorm.kernels.cuda.decode_step import NormData

    return NormData() if norm is None else NormData(norm.eps, _wide(norm.gain))


def _wide(vector: Tensor | None) -> Tensor | None:
    """A contiguous copy in fp32, which the kernel reads."""
    return None if vector is None else vector.detach().to(torch.float32, copy=True).contiguous()
