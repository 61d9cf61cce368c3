"""How far norms are off that keep their own epsilon behind a dropped norm: a bound from calibration inputs.

The cancellation of the published method leaves the second epsilon as it is. What that does to a token is known exactly
(`algebra.dropped_epsilon_error`), from the mean square that the second norm sees and the RMS that the first one had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.errors import Refusal
from flashnorm.passes.carried_norm import Carried, Missing, forget
from flashnorm.sites.cancelling import Cancellation
from flashnorm.sites.probing import NormProbe


@dataclass(frozen=True)
class EpsilonBound:
    """The largest relative error of what a norm returns, if it keeps its epsilon: for every token within what was seen.

    `least_mean_square`: of the norm's input without the earlier division; `r1_square`: the least and the largest square
    of the earlier norm's RMS, its epsilon included, or of the power of it that the input lacks.
    """

    dropped: str
    bound: float
    least_mean_square: float
    r1_square: tuple[float, float]


@dataclass
class _Seen:
    least: float = float("inf")
    low: float = float("inf")
    high: float = 0.0


@torch.no_grad()
def epsilon_bounds(
    model: nn.Module,
    chosen: Iterable[Cancellation],
    probes: Mapping[str, NormProbe],
    calibration: Iterable[Mapping[str, Any]],
) -> dict[str, EpsilonBound]:
    """For every norm that would take the scalar of a dropped one out: how far off it is with its own epsilon.

    `model`: as it is, with nothing dropped. `chosen`: what will be dropped. `calibration`: keyword arguments of forward
    calls. A norm that is dropped as well, or stands behind one whose input lacks a division too, has no bound here and
    is to be kept exact. Raises `Refusal` where the calibration does not reach a norm, or shows a NaN.
    """
    chosen = tuple(chosen)
    dropped = {c.norm for c in chosen}
    absorbers = {a.norm for c in chosen for a in c.absorbers}
    takes = {
        a.norm: (c.norm, a) for c in chosen for a in c.absorbers if a.norm not in dropped and c.norm not in absorbers
    }
    seen: dict[str, _Seen] = defaultdict(_Seen)
    carried = {norm: Carried(norm) for norm, _ in takes.values()}
    missing = {norm: Missing(carried[first], a.arrangement, a.degree) for norm, (first, a) in takes.items()}
    with _watched(model, probes, missing, seen):
        for inputs in calibration:
            model(**inputs)
            for one in carried.values():
                forget(one)
    return {norm: _bound(norm, first, seen[norm], probes[norm]) for norm, (first, _) in takes.items()}


def _bound(norm: str, first: str, seen: _Seen, probe: NormProbe) -> EpsilonBound:
    if not seen.low <= seen.high or not seen.least < float("inf"):
        raise Refusal(
            f"the calibration text did not run {norm}, or gave it no numbers; give more text, or leave it out"
        )
    ends = torch.tensor([seen.low, seen.high], dtype=torch.float64)
    errors = algebra.dropped_epsilon_error(torch.tensor(seen.least, dtype=torch.float64), ends, probe.convention.eps)
    return EpsilonBound(first, float(errors.max()), seen.least, (seen.low, seen.high))


@contextmanager
def _watched(
    model: nn.Module,
    probes: Mapping[str, NormProbe],
    missing: Mapping[str, Missing],
    seen: dict[str, _Seen],
) -> Iterator[None]:
    handles = []
    for one in {m.carried for m in missing.values()}:
        hook = partial(_first, probes[one.norm], one)
        handles.append(model.get_submodule(one.norm).register_forward_pre_hook(hook))
    for norm, lacks in missing.items():
        hook = partial(_second, probes[norm], lacks, seen[norm])
        handles.append(model.get_submodule(norm).register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(probe: NormProbe, carried: Carried, module: nn.Module, args: tuple[Any, ...]) -> None:
    carried.put(algebra.carried_epsilon(_core(probe, args[0]), probe.convention.eps, 1.0))


def _second(probe: NormProbe, missing: Missing, seen: _Seen, module: nn.Module, args: tuple[Any, ...]) -> None:
    """What this norm is called with is y over a power of r₁: mean(y²) is its mean square times the square of that."""
    square = missing.square()
    mean_square = algebra.mean_square(_core(probe, args[0])) * square
    seen.least = _least(seen.least, float(mean_square.min()))
    seen.low = _least(seen.low, float(square.min()))
    seen.high = max(seen.high, float(square.max()))


def _least(a: float, b: float) -> float:
    """The smaller one, NaN where either is."""
    return b if b != b or b < a else a


def _core(probe: NormProbe, x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return algebra.center(wide) if probe.convention.subtracts_mean else wide
