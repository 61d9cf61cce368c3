"""The proof that a spec is all that a model computes: its interpretation against the model's own run in fp32.

The spec is interpreted in fp64, which is exact for this purpose, and in fp32, whose distance to the former shows what
rounding does to this very computation. The model's run must not be farther from fp64 than a few times that. Every half
layer starts from the model's own value, so that nothing adds up, and a difference names the place where it arises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode import reference
from flashnorm.runtime.decode.layer_reading import ReadLayer
from flashnorm.runtime.decode.replica import LayerRun, Surroundings
from flashnorm.runtime.decode.spec import Layer, Spec

# Two fp32 evaluations that add in different orders have independent errors of like size; see `kernels.bounds`.
_CONFIDENCE = 8.0


def prove_layer(found: ReadLayer, run: LayerRun) -> None:
    """Raises `Unsupported`, naming layer and half, where the model's own values differ by more than rounding."""
    at = torch.arange(run.input.shape[1], device=run.input.device).expand(run.input.shape[:2])
    attention, mlp = found.layer.attention, found.layer.mlp
    place = f"layer {run.index}: its attention"
    _prove(place, run.input, found.middle, lambda x: reference.attention_block(x, attention, at))
    place = f"layer {run.index}: its MLP"
    _prove(place, found.middle, run.output, lambda x: reference.mlp_block(x, mlp))


def prove_far(layer: Layer, run: LayerRun, start: int) -> None:
    """As `prove_layer`, for the whole layer and a run whose tokens stand at positions from `start` on."""
    at = torch.arange(run.input.shape[1], device=run.input.device).expand(run.input.shape[:2])

    def compute(x: Tensor) -> Tensor:
        return reference.mlp_block(reference.attention_block(x, layer.attention, at, start=start), layer.mlp)

    _prove(f"layer {run.index} at positions from {start}", run.input, run.output, compute)


def prove_ends(spec: Spec, ids: Tensor, seen: Surroundings, logits: Tensor) -> None:
    """The embedding, the way from each layer to the next, and the head."""
    rows = spec.embedding.detach()[ids].float()
    _prove("its embedding", rows, seen.inputs[0], lambda x: x * spec.multiplier)
    for index, (left, right) in enumerate(zip(seen.outputs, seen.inputs[1:], strict=False)):
        if not torch.equal(left, right):
            raise Unsupported(f"the model does something between layer {index} and layer {index + 1}")
    _prove("its head", seen.outputs[-1], logits, lambda x: reference.logits(x, spec.head))


def _prove(place: str, x: Tensor, actual: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
    exact = compute(x.double())
    unit = torch.finfo(torch.float32).eps / 2
    noise = (compute(x.float()).double() - exact).norm() + unit * exact.norm()
    distance = (actual.double() - exact).norm()
    if not distance <= _CONFIDENCE * noise:
        share = float(distance / exact.norm().clamp(min=torch.finfo(torch.float64).tiny))
        raise Unsupported(f"{place} computes something else than its modules say (relative difference {share:.1e})")
