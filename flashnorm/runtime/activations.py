"""Which activation a gated MLP has, and where its gate and up projections go: by running it on numbers.

gate and up are made to return chosen values, and what the down projection would take is compared with act(gate) ⊙ up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flashnorm.kernels.reference import ACTIVATIONS

_REACH = 8.0  # gate values from -8 to 8: there the activations differ in every digit


class _Taken(Exception):
    """Ends the experiment once the down projection's input is known."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def find_activation(mlp: nn.Module, projections: tuple[nn.Linear, ...], down: nn.Module, x: Tensor) -> str | None:
    """The activation with which `mlp(x)` computes down(act(gate) ⊙ up); None where it does something else.

    `projections`: gate and up, in this order, or one linear that holds gate's outputs and then up's.
    """
    width = sum(p.out_features for p in projections) // 2
    steps = torch.arange(x.numel() // x.shape[-1] * width, dtype=torch.float64, device=x.device)
    gate = (steps / (steps.numel() - 1) * 2 - 1).mul(_REACH).view(*x.shape[:-1], width)
    up = (1.5 + torch.sin(steps)).view_as(gate)
    values = [gate, up] if len(projections) == 2 else [torch.cat([gate, up], -1)]
    taken = _input_of(down, mlp, x, dict(zip(projections, values, strict=True)))
    if taken is None or taken.shape != gate.shape:
        return None
    # In float64 throughout, but for a last rounding where the model casts what goes down.
    unit = torch.finfo(taken.dtype).eps
    for name, function in ACTIVATIONS.items():
        expected = function(gate) * up
        if bool(((taken.double() - expected).abs() <= unit * expected.abs() + 2.0**-40 * _REACH).all()):
            return name
    return None


def _input_of(down: nn.Module, mlp: nn.Module, x: Tensor, answers: dict[nn.Linear, Tensor]) -> Tensor | None:
    """What `down` is called with in `mlp(x)` when each of the given linears returns the given value."""
    with _answering(answers, down):
        try:
            mlp(x)
        except _Taken as taken:
            return taken.value if isinstance(taken.value, Tensor) and taken.value.is_floating_point() else None
        except (RuntimeError, TypeError, ValueError):  # it does not compute in float64
            return None
    return None


@contextmanager
def _answering(answers: dict[nn.Linear, Tensor], down: nn.Module) -> Iterator[None]:
    def take(module: nn.Module, args: tuple[object, ...]) -> None:
        raise _Taken(args[0] if len(args) == 1 else None)

    handles = [
        linear.register_forward_hook(lambda module, args, output, value=value: value)
        for linear, value in answers.items()
    ]
    handles.append(down.register_forward_pre_hook(take))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
