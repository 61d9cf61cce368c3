"""Fold norm gains into their readers, on a live module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from flashnorm.errors import Refusal
from flashnorm.sites.audit import audit
from flashnorm.sites.types import Consumer, Site


@dataclass(frozen=True)
class FoldReport:
    """What a fold did: the norms whose gains now live in the next weights, and for every other norm the reason."""

    folded: list[str]
    skipped: dict[str, str]
    grown_bytes: int = 0  # by how much an untied head makes the checkpoint larger
    already_folded: bool = False  # nothing was done: the input was the output of an earlier fold


def fold(model: nn.Module) -> FoldReport:
    """Fold every gain that can be folded, in place; each weight is rounded once, to its own dtype.

    The model computes the same function afterwards. Raises `Refusal` on a NaN or infinite gain, before anything changed.
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
    """Why the *values* of a foldable site's gain and bias forbid the fold. Raises `Refusal` on values that are broken."""
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
    """The gain (width,) that a stored norm weight stands for: offset + weight, in float32 or better."""
    assert site.convention is not None
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).reshape(-1)
    return site.convention.offset + wide


def factor_along(consumer: Consumer, gain: torch.Tensor, length: int) -> torch.Tensor:
    """The factor at each position of the consumer's axis, (length,): the gain of its channel, or one."""
    if consumer.channels is None:
        return gain
    ones = torch.ones(length, dtype=gain.dtype, device=gain.device)
    channels = consumer.channels.to(gain.device)
    return torch.where(channels >= 0, gain[channels.clamp(min=0)], ones)


def moves_shift(site: Site) -> bool:
    """The norm's bias can move into the next biases; otherwise it stays, divided by the gain."""
    return all(consumer.takes_shift for consumer in site.consumers)


def remaining_bias(gain: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The bias that a norm without its gain needs so that gain * (core + b') = gain * core + b."""
    wide = bias.detach().to(gain.dtype).reshape(-1)
    return torch.where(gain == 0, torch.zeros_like(wide), wide / torch.where(gain == 0, torch.ones_like(gain), gain))


@torch.no_grad()
def apply_fold(model: nn.Module, sites: Iterable[Site]) -> None:
    """Move the gains of the given sites, whatever their verdict: `fold` chooses them, tests force them."""
    factors: dict[str, tuple[int, torch.Tensor]] = {}
    for site in sites:
        weight, bias = _own_values(model, site)
        gain = gain_of(site, weight)
        shift = bias is not None and moves_shift(site)
        for consumer in site.consumers:
            reader = model.get_parameter(consumer.weight)
            if shift:
                assert bias is not None
                assert consumer.bias is not None
                _add_shift(model.get_parameter(consumer.bias), reader, consumer, bias)
            factor = factor_along(consumer, gain.to(reader.device), reader.shape[consumer.axis])
            axis, before = factors.get(consumer.weight, (consumer.axis, torch.ones_like(factor)))
            factors[consumer.weight] = (axis, before * factor)
        if bias is not None:
            bias.copy_(torch.zeros_like(bias) if shift else remaining_bias(gain, bias).reshape(bias.shape))
        assert site.convention is not None
        weight.fill_(site.convention.identity)
    for name, (axis, factor) in factors.items():
        _scale(model.get_parameter(name), axis, factor)


def _own_values(model: nn.Module, site: Site) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert site.weight is not None
    return model.get_parameter(site.weight), model.get_parameter(site.bias) if site.bias else None


def _scale(weight: torch.Tensor, axis: int, factor: torch.Tensor) -> None:
    shape = [1] * weight.ndim
    shape[axis] = -1
    wide = weight.to(torch.promote_types(weight.dtype, factor.dtype))
    weight.copy_(wide * factor.view(shape).to(wide.dtype))


def shift_vector(consumer: Consumer, bias: torch.Tensor) -> torch.Tensor:
    """The norm's bias at each position of the consumer's axis, (length,), in float32 or better."""
    wide = bias.detach().to(torch.promote_types(bias.dtype, torch.float32)).reshape(-1)
    return wide if consumer.channels is None else wide[consumer.channels.to(wide.device)]


def _add_shift(next_bias: torch.Tensor, weight: torch.Tensor, consumer: Consumer, bias: torch.Tensor) -> None:
    """The next bias takes over W b, with W as it was before the fold and b along its read axis."""
    vector = shift_vector(consumer, bias)
    wide = torch.promote_types(weight.dtype, vector.dtype)
    shift = torch.tensordot(weight.to(wide), vector.to(wide), dims=([consumer.axis], [0]))
    next_bias.copy_(next_bias.to(wide) + shift)
