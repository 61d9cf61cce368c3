"""Fold norm gains into their readers, on a live module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.errors import Refusal
from flashnorm.sites.audit import audit
from flashnorm.sites.folding import FoldReport, gain_of, moves_shift, remaining_bias, value_problem
from flashnorm.sites.types import Consumer, Site

_MOVED = "a norm's gain or bias has moved into it"
_Factors = Mapping[str, list[tuple[int, torch.Tensor]]]  # parameter -> the factor along each axis that is scaled


def fold(model: nn.Module, *, inputs: dict[str, Any] | None = None) -> FoldReport:
    """Fold every gain that can be folded, in place; each weight is rounded once, to its own dtype.

    The model computes the same function afterwards. `inputs`: as for `flashnorm.audit`. Raises `Refusal`, with nothing
    changed, where a gain or bias is NaN or infinite, a folded weight does not fit its dtype, or a weight to be changed
    is not in memory (offloaded), and what `audit` raises.
    """
    report = audit(model, inputs=inputs)
    _refuse_absent(model, report.foldable)
    skipped = dict(report.skipped)
    chosen = []
    for site in report.foldable:
        reason = value_problem(site, *_own_values(model, site), shift_moves=moves_shift(site))
        if reason is None:
            chosen.append(site)
        else:
            skipped[site.norm] = reason
    apply_fold(model, chosen)
    return FoldReport([site.norm for site in chosen], skipped)


@torch.no_grad()
def apply_fold(model: nn.Module, sites: Iterable[Site]) -> None:
    """Move the gains of the given sites, whatever their verdict: `fold` chooses them, tests force them.

    In two steps, so that a refusal leaves the model as it was: everything is computed and checked, then written. The
    scaled weights are computed again to be written, since all of them together would double the model's memory.
    """
    sites = tuple(sites)
    factors = _factors(model, sites)
    vectors = _vectors(model, sites)
    for name, value in vectors.items():
        refuse_overflow(name, model.get_parameter(name), value)
    for name, along in factors.items():
        weight = vectors.get(name, model.get_parameter(name))
        refuse_overflow(name, weight, algebra.fold_gains(weight, along))
    for name, value in vectors.items():
        model.get_parameter(name).copy_(value)
    for name, along in factors.items():
        weight = model.get_parameter(name)
        weight.copy_(algebra.fold_gains(weight, along))


def _factors(model: nn.Module, sites: tuple[Site, ...]) -> _Factors:
    """What every reader is multiplied by, on the reader's device; gains that meet along one axis are one factor."""
    found: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for site in sites:
        gain = gain_of(site, _own_values(model, site)[0])
        for consumer in site.consumers:
            device = model.get_parameter(consumer.weight).device
            factor = algebra.spread(gain.to(device), _channels(consumer, device), rest=1.0)
            axes = found[consumer.weight]
            axes[consumer.axis] = axes[consumer.axis] * factor if consumer.axis in axes else factor
    return {name: list(axes.items()) for name, axes in found.items()}


def _vectors(model: nn.Module, sites: tuple[Site, ...]) -> dict[str, torch.Tensor]:
    """The new values of the norms' own gains and biases, and of the biases that norms' biases move into."""
    new: dict[str, torch.Tensor] = {}
    for site in sites:
        weight, bias = _own_values(model, site)
        assert site.weight is not None
        assert site.convention is not None
        new[site.weight] = torch.full_like(weight, site.convention.identity)
        if bias is None or site.bias is None:
            continue
        if not moves_shift(site):
            new[site.bias] = remaining_bias(gain_of(site, weight), bias).reshape(bias.shape).to(bias.dtype)
            continue
        move_shift(model, site, new)
    return new


def move_shift(model: nn.Module, site: Site, new: dict[str, torch.Tensor]) -> None:
    """Put into `new` what parameters become where the norm's bias moves into the next biases, which all take it."""
    bias = _own_values(model, site)[1]
    assert site.bias is not None
    assert bias is not None
    new[site.bias] = torch.zeros_like(bias)
    for consumer in site.consumers:
        assert consumer.bias is not None
        before = new.get(consumer.bias, model.get_parameter(consumer.bias).detach())
        new[consumer.bias] = _shifted(model.get_parameter(consumer.weight), consumer, bias, before)


def _shifted(reader: torch.Tensor, consumer: Consumer, shift: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    moved = shift.reshape(-1).to(reader.device)
    target = before.to(reader.device)
    return algebra.fold_shift(reader, moved, target, consumer.axis, _channels(consumer, reader.device))


def _channels(consumer: Consumer, device: torch.device) -> torch.Tensor | None:
    return None if consumer.channels is None else consumer.channels.to(device)


def _own_values(model: nn.Module, site: Site) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert site.weight is not None
    return model.get_parameter(site.weight), model.get_parameter(site.bias) if site.bias else None


def _refuse_absent(model: nn.Module, sites: Iterable[Site]) -> None:
    for site in sites:
        names = [site.weight, site.bias, *(name for c in site.consumers for name in (c.weight, c.bias))]
        for name in filter(None, names):
            if model.get_parameter(name).is_meta:
                raise Refusal(f"{name} has no values in memory, so it cannot be folded; load the model without offload")


def refuse_overflow(name: str, before: torch.Tensor, after: torch.Tensor, how: str = _MOVED) -> None:
    """Raise `Refusal` where a finite value of a parameter would not be one. `how`: what would make it so."""
    lost = torch.isfinite(before) & ~torch.isfinite(after).to(before.device)
    if lost.any():
        raise Refusal(f"{name} does not fit {before.dtype} once {how}; convert the model to bfloat16 or float32 first")
