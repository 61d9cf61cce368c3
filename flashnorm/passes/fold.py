"""Fold norm gains into their readers, on a live module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.errors import Refusal
from flashnorm.passes.report import FoldReport
from flashnorm.sites.audit import audit
from flashnorm.sites.types import Consumer, Site


def fold(model: nn.Module) -> FoldReport:
    """Fold every gain that can be folded, in place; each weight is rounded once, to its own dtype.

    The model computes the same function afterwards. Raises `Refusal` on a NaN or infinite gain, with nothing changed.
    """
    report = audit(model)
    folded, skipped = [], dict(report.skipped)
    chosen = []
    for site in report.foldable:
        reason = value_problem(site, *_own_values(model, site), shift_moves=moves_shift(site))
        if reason is None:
            chosen.append(site)
            folded.append(site.norm)
        else:
            skipped[site.norm] = reason
    apply_fold(model, chosen)
    return FoldReport(folded, skipped)


def value_problem(site: Site, weight: torch.Tensor, bias: torch.Tensor | None, shift_moves: bool) -> str | None:
    """Why the *values* of a foldable site's gain and bias forbid the fold. Raises `Refusal` on broken ones."""
    gain = gain_of(site, weight)
    if not torch.isfinite(gain).all():
        channel = int((~torch.isfinite(gain)).nonzero()[0])
        raise Refusal(f"the gain of {site.norm} is not finite at channel {channel}: the checkpoint is damaged")
    if bias is not None and not shift_moves:
        stuck = (gain == 0) & (bias.reshape(-1) != 0)
        if stuck.any():
            channel = int(stuck.nonzero()[0])
            return f"its gain is zero at channel {channel} while its bias, which has to stay, is not"
    return None


def gain_of(site: Site, weight: torch.Tensor) -> torch.Tensor:
    """The gain (width,) that a stored norm weight stands for, in float32 or better."""
    assert site.convention is not None
    return algebra.gain_of(weight.detach().reshape(-1), site.convention.offset)


def moves_shift(site: Site) -> bool:
    """The norm's bias can move into the next biases; otherwise it stays, divided by the gain."""
    return all(consumer.takes_shift for consumer in site.consumers)


def remaining_bias(gain: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The bias (width,) that a norm keeps when its gain moves and its bias does not, in float32 or better.

    A channel whose gain is zero has a zero bias here (`value_problem` sees to it), and keeps it.
    """
    return algebra.kept_shift(bias.detach().reshape(-1).to(gain.dtype), torch.where(gain == 0, 1.0, gain))


@torch.no_grad()
def apply_fold(model: nn.Module, sites: Iterable[Site]) -> None:
    """Move the gains of the given sites, whatever their verdict: `fold` chooses them, tests force them."""
    factors: dict[tuple[str, int], torch.Tensor] = {}
    for site in sites:
        weight, bias = _own_values(model, site)
        gain = gain_of(site, weight)
        shift = bias is not None and moves_shift(site)
        for consumer in site.consumers:
            reader = model.get_parameter(consumer.weight)
            if shift and bias is not None:
                _move_shift(model, consumer, reader, bias)
            factor = algebra.spread(gain, consumer.channels, rest=1.0).to(reader.device)
            key = (consumer.weight, consumer.axis)
            # One rounding for each weight, however many gains it takes in.
            factors[key] = factors[key] * factor if key in factors else factor
        if bias is not None:
            bias.copy_(torch.zeros_like(bias) if shift else remaining_bias(gain, bias).reshape(bias.shape))
        assert site.convention is not None
        weight.fill_(site.convention.identity)
    for (name, axis), factor in factors.items():
        reader = model.get_parameter(name)
        reader.copy_(algebra.fold_gain(reader, factor, axis))


def _move_shift(model: nn.Module, consumer: Consumer, reader: torch.Tensor, bias: torch.Tensor) -> None:
    assert consumer.bias is not None
    target = model.get_parameter(consumer.bias)
    target.copy_(algebra.fold_shift(reader, bias.reshape(-1), target, consumer.axis, consumer.channels))


def _own_values(model: nn.Module, site: Site) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert site.weight is not None
    return model.get_parameter(site.weight), model.get_parameter(site.bias) if site.bias else None
