"""Decides by experiment whether a module is a norm, and how it turns its weight into a gain.

Nothing is inferred from class names or from the values of the weights: a copy of the module is run on known inputs
with known weights, in float64, and its answers are compared with what a norm would say.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flashnorm.sites.types import EpsilonPlacement, GainConvention, MultiplyOrder

_ROWS = 4
_CALLS = 3
# What a module raises at inputs that it does not take.
_NO_EPSILON: EpsilonPlacement = "none"
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, AssertionError)
_SLOPE = 0.8  # of a DyT's tanh
_SILU_ONE = 1.2784645427610738  # silu of this is 1, so that a SiLU gate is neutral


@dataclass(frozen=True)
class NormProbe:
    """What the experiment found."""

    convention: GainConvention
    weight: str | None  # own parameter name of the gain
    bias: str | None
    irregular: str | None = None  # why the model's next call of it may do something else


def is_candidate(module: nn.Module) -> bool:
    """Could this module be a norm at all? It owns at most a small gain and a bias, and no submodule with weights.

    Beside them a DyT has one number, the slope of its tanh.

    A hollow parameter or buffer is far larger than any gain, and has no values to experiment with.
    """
    if any(buffer.is_meta for buffer in module.buffers()):
        return False
    own = dict(module.named_parameters(recurse=False))
    below = sum(1 for _ in module.parameters())
    small = all(p.ndim <= 2 and p.is_floating_point() and not p.is_meta for p in own.values())
    channelled = _channelled(own)
    return below == len(own) and len(channelled) <= 2 and len(own) - len(channelled) <= 1 and small


def _channelled(own: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters with a value for each channel: all, where none has more than one value."""
    wide = {name: p for name, p in own.items() if p.numel() > 1}
    return wide or {name: p for name, p in own.items() if p.ndim}


def probe(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> NormProbe | None:
    """Run the experiment on a copy of `module`, with inputs shaped like the call `module(*args, **kwargs)`.

    Returns None when the module is not a norm over its last dimension(s).
    """
    experiment = _Experiment.prepare(module, args, kwargs)
    if experiment is None:
        return None
    irregular = _irregularity(experiment)
    experiment.afresh = irregular is not None
    try:
        found = _conclude(experiment)
        if found is not None and irregular is None:
            irregular = _buffer_in_gain(experiment, found)
    except _REFUSALS:
        return None  # it does not accept a norm's inputs, so it is not one
    return found and replace(found, irregular=irregular)


class _Experiment:
    """A copy of the module in float64 with settable parameters and inputs."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[nn.Module, torch.Tensor, float], torch.Tensor],
        lead: tuple[int, ...],
        trailing: tuple[int, ...],
    ):
        self.module = module
        self.parameters = _channelled(dict(module.named_parameters(recurse=False)))
        for name, parameter in module.named_parameters(recurse=False):
            if name not in self.parameters:
                parameter.data.fill_(_SLOPE)  # a tanh of slope zero would show nothing
        self.width = width = math.prod(trailing)
        self.afresh = True  # every call is the first one of a new copy, of one position
        self._call, self._lead, self._trailing = call, lead, trailing
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(_ROWS, width, dtype=torch.float64, generator=generator)
        self.gain = torch.rand(width, dtype=torch.float64, generator=generator) + 0.5

    @classmethod
    def prepare(cls, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> _Experiment | None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.is_floating_point()]
        if not tensors or tensors[0].ndim == 0:
            return None
        shape = tensors[0].shape
        own = list(_channelled(dict(module.named_parameters(recurse=False))).values())
        trailing = own[0].shape if own else shape[-1:]
        if any(p.shape != trailing for p in own) or shape[len(shape) - len(trailing) :] != trailing:
            return None

        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        first, *others = (i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor) and a.is_floating_point())

        def call(copied: nn.Module, x: torch.Tensor, gate: float) -> torch.Tensor:
            own = list(leaves)
            own[first] = x
            for other in others:
                own[other] = torch.full_like(x, gate)
            positional, named = tree_unflatten(own, structure)
            out = copied(*positional, **named)
            if not isinstance(out, torch.Tensor) or out.numel() != x.numel():
                raise ValueError("not one tensor of the input's shape")
            return out

        lead = tuple(shape[: len(shape) - len(trailing)])
        return cls(_bare_copy(module).to("cpu", torch.float64), call, lead, tuple(trailing))

    def run(
        self,
        x: torch.Tensor,
        values: Mapping[str, float | torch.Tensor],
        dtype: torch.dtype = torch.float64,
        gate: float = _SILU_ONE,
    ) -> torch.Tensor:
        """Outputs (rows, width) for inputs (rows, width), with the named parameters set to the given values.

        Every row is a call of its own, on one position, until `_irregularity` has found calls and positions to be
        alike; then each call takes as many as the model's own, which is what they were found to be alike in.
        """
        self.module.to(dtype)
        alone = (1,) * len(self._lead)
        together = 1 if self.afresh or not alone else max(1, self._lead[-1])
        with torch.no_grad():
            self._set(values)
            parts = x.to(dtype, copy=True).split(together)  # a norm may work in place
            calls = [part.view(*alone[1:], *([len(part)] if alone else []), *self._trailing) for part in parts]
            outputs = [self._call(copy.deepcopy(self.module) if self.afresh else self.module, c, gate) for c in calls]
            return torch.cat([out.reshape(-1, self.width) for out in outputs]).to(torch.float64)

    def calls(self, values: Mapping[str, float | torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Inputs (positions, width) at as many positions as the model's own call has, and at least two; outputs
        of the same shape of several such calls of one copy, the first of which is its very first."""
        lead = tuple(max(n, 2 if d == len(self._lead) - 1 else 1) for d, n in enumerate(self._lead))
        x = self.x[torch.arange(math.prod(lead)) % _ROWS]
        with torch.no_grad():
            self._set(values)
            copied = copy.deepcopy(self.module)
            outputs = [self._call(copied, x.clone().view(*lead, *self._trailing), _SILU_ONE) for _ in range(_CALLS)]
            return x, [out.reshape(x.shape).clone() for out in outputs]

    def _set(self, values: Mapping[str, float | torch.Tensor]) -> None:
        for name, value in values.items():
            parameter = self.parameters[name]
            parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype).expand(self.width).reshape(parameter.shape))


def _bare_copy(module: nn.Module) -> nn.Module:
    """A copy without the hooks that others hung on the module."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return copied


def _irregularity(e: _Experiment) -> str | None:
    """Why what is found out by single calls on single positions does not hold for every call and every position."""
    values = dict.fromkeys(e.parameters, e.gain)
    try:
        x, outputs = e.calls(values)
        alone = e.run(e.x, values)[torch.arange(len(x)) % _ROWS]
    except _REFUSALS as error:
        return f"it could not be tried on several positions: {error}"
    scale = 1e-5 * alone.abs().max()
    if any((later - outputs[0]).abs().max() > scale for later in outputs[1:]):
        return "its output changes from call to call for one and the same input"
    if not (outputs[0] - alone).abs().max() <= scale:
        return "its output at a position depends on where that is, or on other positions"
    return None


def _buffer_in_gain(e: _Experiment, found: NormProbe) -> str | None:
    """The offset must not come from a buffer that a checkpoint holds: there it may have another value."""
    for name, buffer in e.module.state_dict().items():
        if found.weight is None or name in e.parameters or not buffer.is_floating_point():
            continue
        before = buffer.clone()
        buffer.mul_(1.5).add_(0.25)  # the module's own memory
        if _find_roles(e) != (found.weight, found.bias, found.convention.offset):
            return f"its gain also depends on the buffer {name}"
        buffer.copy_(before)
    return None


def _conclude(e: _Experiment) -> NormProbe | None:
    roles = _find_roles(e)
    if roles is None:
        return None
    gain_name, bias_name, offset = roles
    neutral: dict[str, float] = {gain_name: 1.0 - offset} if gain_name else {}
    if bias_name:
        neutral[bias_name] = 0.0

    def core(x: torch.Tensor) -> torch.Tensor:
        return e.run(x, neutral)

    saturates = gain_name is not None and _saturates(core, e.x)
    if not (saturates or _ignores_scale(core, e.x)):
        return None
    gated = not torch.allclose(e.run(e.x, neutral, gate=0.3), e.run(e.x, neutral, gate=1.7), rtol=1e-6, atol=0)
    # In float32, not float64: a module without an epsilon of its own takes that of the dtype it computes in.
    eps, placement = (0.0, _NO_EPSILON) if saturates else _find_epsilon(lambda x: e.run(x, neutral, torch.float32), e.x)
    convention = GainConvention(
        offset=offset,
        eps=eps,
        eps_placement=placement,
        subtracts_mean=_subtracts_mean(core, e.x),
        has_bias=bias_name is not None,
        multiply=_multiply_order(e, gain_name, neutral, offset) if gain_name else "unknown",
        group_size=_group_size(core, e.x),
        gated=gated,
        saturates=saturates,
    )
    return NormProbe(convention, gain_name, bias_name)


def _find_roles(e: _Experiment) -> tuple[str | None, str | None, float] | None:
    """Which parameter is the gain, which the bias, and the offset in gain = offset + weight."""
    if not e.parameters:
        return None, None, 0.0
    zero: dict[str, float | torch.Tensor] = dict.fromkeys(e.parameters, 0.0)
    base = e.run(e.x, zero)
    gain_name, bias_name = None, None
    for name in e.parameters:
        effect = e.run(e.x, {**zero, name: e.gain}) - base
        if torch.allclose(effect, e.gain.expand_as(effect), rtol=1e-5, atol=1e-6):
            bias_name = name
        else:
            gain_name = name
    if gain_name is None or (len(e.parameters) == 2 and bias_name is None):
        return None
    one, two = e.run(e.x, {**zero, gain_name: 1.0}), e.run(e.x, {**zero, gain_name: 2.0})
    core = two - one
    offset = ((base * core).sum() / (core * core).sum()).item()
    offset = float(f"{offset:.5g}") + 0.0
    scale = core.abs().max()
    affine = (base - offset * core).abs().max() <= 1e-5 * scale
    for gain in (e.gain, -e.gain):  # of either sign: |w| and max(w, 0) are no gains
        measured = e.run(e.x, {**zero, gain_name: gain})
        affine = affine and (measured - (offset + gain) * core).abs().max() <= 1e-5 * scale
    return (gain_name, bias_name, 0.0 if abs(offset) < 1e-5 else offset) if affine and scale > 0 else None


def _ignores_scale(core: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """A norm gives the same answer for x and 4x, and a different one for a different direction."""
    near, far, other = core(1e3 * x), core(4e3 * x), core(1e3 * x.flip(0))
    size = near.abs().max()
    if not torch.isfinite(near).all() or size == 0:
        return False
    # `-x` gives the opposite: tells a norm from the sign-free or saturating functions that also ignore scale.
    odd = (core(-1e3 * x) + near).abs().max() <= 1e-4 * size
    graded = torch.corrcoef(torch.stack([near.flatten(), x.flatten()]))[0, 1] > 0.9
    return bool((near - far).abs().max() <= 1e-4 * size and (near - other).abs().max() > 1e-2 * size and odd and graded)


def _saturates(core: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """A DyT works channel by channel, is odd and nearly linear at small inputs, and has one bound at large ones."""
    top, here, small = core(1e6 * x), core(x), core(1e-6 * x)
    size = top.abs().max()
    if not torch.isfinite(top).all() or size == 0:
        return False
    bounded = (top - size * x.sign()).abs().max() <= 1e-6 * size
    odd = (core(-x) + here).abs().max() <= 1e-6 * size
    slope = small / x
    linear = slope.min() > 0 and (slope - slope.mean()).abs().max() <= 1e-3 * slope.mean()
    return bool(bounded and odd and linear) and _group_size(core, x) == 1


def _subtracts_mean(core: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    return bool((core(x + 1.0) - core(x)).abs().max() <= 1e-3 * core(x).abs().max())


def _group_size(core: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """How many channels share one RMS: change one channel, count the channels that answer."""
    changed = x.clone()
    changed[:, 0] = 10.0 * changed[:, 0].sign() * (1 + changed[:, 0].abs())
    moved = ((core(changed) - core(x)).abs() > 1e-9).any(0)
    return int(moved.nonzero().max().item()) + 1 if moved.any() else x.shape[1]


def _find_epsilon(core: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[float, EpsilonPlacement]:
    """Read the denominator D(a) off the answers to inputs of RMS a.

    Inside the square root D = sqrt(a^2 + eps), outside D = a + eps, as a clamp D = max(a, eps). At a -> 0 this gives
    D(0); at a = D(0) the answer is 1/sqrt(2), 1/2 or 1 of the unit answer.
    """
    unit = x - x.mean(-1, keepdim=True)
    unit = unit / unit.pow(2).mean(-1, keepdim=True).sqrt()

    def level(a: float) -> float:
        return core(a * unit).pow(2).mean().sqrt().item()

    full = level(1e4)
    tiny = 1e-12
    at_tiny = level(tiny) / full
    if at_tiny > 0.5:
        return 0.0, "none"
    if at_tiny == 0.0:
        return float("nan"), "none"
    bottom = tiny / at_tiny
    at_bottom = level(bottom) / full
    placements: list[tuple[float, EpsilonPlacement]] = [
        (0.5**0.5, "inside_sqrt"),
        (0.5, "outside_sqrt"),
        (1.0, "clamp"),
    ]
    placement = min(placements, key=lambda p: abs(p[0] - at_bottom))[1]
    eps = bottom**2 if placement == "inside_sqrt" else bottom
    return float(f"{eps:.5g}"), placement


def _multiply_order(e: _Experiment, gain_name: str, neutral: dict[str, Any], offset: float) -> MultiplyOrder:
    """Compare bitwise, in bfloat16, with both orders of the multiply and the cast."""
    x = e.x.to(torch.bfloat16).to(torch.float64)
    weight = (e.gain - offset).to(torch.bfloat16)
    normed = e.run(x, neutral, torch.float32).to(torch.float32)
    measured = e.run(x, {**neutral, gain_name: weight}, torch.bfloat16).to(torch.bfloat16)
    after = normed.to(torch.bfloat16) * (offset + weight)
    before = (normed * (offset + weight.float())).to(torch.bfloat16)
    agreement = {"after_cast": (measured == after), "before_cast": (measured == before)}
    shares = {order: same.double().mean().item() for order, same in agreement.items()}
    best = max(shares, key=lambda order: shares[order])
    if shares[best] < 0.99:
        return "unknown"
    return "after_cast" if best == "after_cast" else "before_cast"
