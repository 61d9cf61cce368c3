"""Which recorded value is which: decided by the numbers themselves, never by a module's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashnorm.runtime.decode.reference import ACTIVATIONS, rotate
from flashnorm.runtime.decode.replica import Call
from flashnorm.runtime.decode.spec import Linear, Rope

_SAME = 2.0**-18  # relative; apart from the order of additions, equal fp32 computations are closer than this


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two values are the same computation, up to the order of its additions."""
    return left.shape == right.shape and bool((left - right).norm() <= _SAME * right.norm())


def linears(calls: Iterable[Call]) -> list[Call]:
    """The calls of plain `nn.Linear` modules, those alone whose forward is not overridden."""
    return [c for c in calls if isinstance(c.module, nn.Linear) and type(c.module).forward is nn.Linear.forward]


def by_head(value: Tensor, heads: int, head_dim: int, tokens: int) -> Tensor | None:
    """A value as (tokens, heads, head_dim), whichever of the usual ways it lies; None where it cannot be that."""
    if value.numel() != tokens * heads * head_dim:
        return None
    if value.dim() == 4 and value.shape[1:] == (heads, tokens, head_dim):
        return value[0].transpose(0, 1)
    return value.reshape(tokens, heads, head_dim)


def parts(call: Call, rows: int, step: int) -> Iterator[tuple[Tensor, slice]]:
    """Every run of `rows` outputs of a linear that starts at a multiple of `step`, with the rows of its weight."""
    for start in range(0, call.output.shape[-1] - rows + 1, step):
        yield call.output[..., start : start + rows], slice(start, start + rows)


def linear_part(module: nn.Linear, rows: slice) -> Linear:
    """Some rows of a linear, as views of its parameters; the parameters themselves where they are all."""
    weight, bias = module.weight, module.bias
    if rows == slice(0, weight.shape[0]):
        return Linear(weight, bias)
    return Linear(weight.detach()[rows], None if bias is None else bias.detach()[rows])


def likeness(left: Tensor, right: Tensor) -> float:
    """The cosine between two values: 1 for one that is a multiple of the other."""
    left, right = left.double().flatten(), right.double().flatten()
    return float(left @ right / (left.norm() * right.norm()).clamp(min=1e-300))


def multiplier(moved: Tensor, by: Tensor) -> float:
    """The m of moved = m · by: of all numbers that rounding cannot tell apart, the one with the fewest digits.

    Least squares finds m with a standard error of |moved - m · by| / (√n |by|), over the n elements. Where `by` is zero
    every m is as good as 1.
    """
    moved, by = moved.double().flatten(), by.double().flatten()
    length = by.norm()
    if length == 0:
        return 1.0
    m = float(moved @ by / length.square())
    error = 8 * float((moved - m * by).norm() / length) / len(by) ** 0.5 + torch.finfo(torch.float32).eps * abs(m)
    stated = (float(f"{m:.{digits}g}") for digits in range(1, 10))
    return next((number for number in stated if abs(number - m) <= error), m)


def activation_of(up: Tensor, gate: Tensor | None, result: Tensor) -> str | None:
    """The activation with result = act(gate) · up, or act(up) without a gate; None where it is no known one."""
    for name, act in ACTIVATIONS.items():
        if same(act(up) if gate is None else act(gate) * up, result):
            return name
    return None


@dataclass(frozen=True)
class Rotation:
    """How channels pair up, and which columns of the model's tables hold the angles: every `step`-th below `stop`."""

    interleaved: bool
    stop: int
    step: int

    def of(self, table: Tensor) -> Tensor:
        return table[:, : self.stop : self.step]


def rotation(before: Tensor, after: Tensor, cos: Tensor, sin: Tensor) -> Rotation | None:
    """How `before` was turned into `after`, both (tokens, heads, head_dim), by tables (tokens, width).

    None where they were not turned by these. Tables usually name every angle twice, one half after the other or side
    by side.
    """
    width, at = cos.shape[-1], torch.arange(len(before), device=before.device)
    for stop, step in ((width // 2, 1), (width, 2), (width, 1)):
        for interleaved in (False, True):
            how = Rotation(interleaved, stop, step)
            rope = Rope(how.of(cos), how.of(sin), interleaved)
            if 2 * rope.cos.shape[-1] > before.shape[-1]:
                continue
            if same(rotate(before[None], rope, at[None])[0], after):
                return how
    return None
