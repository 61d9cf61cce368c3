"""Likely causes: what makes one module's output wrong, told from its weights and from the scalars of its tokens.

**Weights.** With G the gain of the norm that a weight W reads, a fold keeps W diag(G). Let E = W diag(G) of the
reference and E' that of the candidate, each with its own norm's gain. If E' = E diag(ρ) up to rounding, ρ names the
mistake: G where the gain acts twice, 1/G where it is in neither place, (G - 1)/G or (G + 1)/G where it was taken for
the other convention's.

**Scalars.** If the candidate's normed value is the reference's times a scalar s for each token, the norm's RMS is
another one. The mean square q of the reference's normed value without its gain is m/(m + ε) with m the mean square of
the norm's input, so ε/m = 1/q - 1 is known without looking at the input, and likewise for the candidate, whose mean
square is s² q. The ratio α of the two is the factor on ε: 0 where ε was dropped, a constant where it was scaled. And
s = 1/sqrt(m + ε) where the scale was applied twice. All of it is known as well as s is, up to `SIGMAS` times what
rounding does to the module, δ, so α up to 2 δ m/ε; tokens for which that exceeds one half say nothing about ε.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashnorm.sites.folding import gain_of
from flashnorm.sites.tying import tied_groups
from flashnorm.sites.types import Consumer, Site
from flashnorm.verify.bounds import SIGMAS
from flashnorm.verify.parting import Parting

_ROUNDINGS = 8  # units that a product of two stored numbers, rounded and compared with another one, may be off


def norm_of(sites: Sequence[Site]) -> dict[str, str]:
    """Module -> the norm that it is, or that it reads."""
    names = {site.norm: site.norm for site in sites}
    readers = {_owner(consumer.weight): site.norm for site in sites for consumer in site.consumers}
    return {**readers, **names}


def likely_cause(parting: Parting, reference: nn.Module, candidate: nn.Module, sites: Sequence[Site]) -> str:
    """What the first parted module suffers from, in words; empty where nothing known fits."""
    if parting.first is None:
        return ""
    name = parting.first.name
    tied = _tied_embedding(name, reference, candidate, sites)
    if tied:
        return tied
    for site in sites:
        for consumer in site.consumers:
            if _owner(consumer.weight) == name:
                found = _weight_cause(site, consumer, reference, candidate)
                if found:
                    return found
    return _scalar_cause(parting, reference, sites)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _weight_cause(site: Site, consumer: Consumer, reference: nn.Module, candidate: nn.Module) -> str:
    if site.weight is None or consumer.channels is not None:
        return ""
    own, other = (_parameter(model, consumer.weight) for model in (reference, candidate))
    gains = [_gain(site, model) for model in (reference, candidate)]
    if own is None or other is None or own.shape != other.shape or any(gain is None for gain in gains):
        return ""
    unit = _ROUNDINGS * torch.finfo(own.dtype).eps / 2
    gain, left = (g for g in gains if g is not None)
    ours, theirs = (w.double().movedim(consumer.axis, -1) * g for w, g in ((own, gain), (other, left)))
    expert = _odd_one_out(ours, theirs, unit)
    if expert is not None:
        return f"expert {expert} of {consumer.weight} was left out of the fold"
    factor = (ours * theirs).flatten(0, -2).sum(0) / ours.square().flatten(0, -2).sum(0).clamp(min=1e-300)
    if not _near(theirs, ours * factor, unit):
        return ""
    return _named(factor, gain, left, unit, consumer.weight, site.norm)


def _named(factor: Tensor, gain: Tensor, left: Tensor, unit: float, weight: str, norm: str) -> str:
    ones = torch.ones_like(gain)
    if _near(factor, ones, unit):
        return ""
    if _near(factor, gain, unit):
        twice = "it was folded twice" if _near(left, ones, unit) else f"it was folded and {norm} still has it"
        return f"the gain of {norm} acts twice on {weight}: {twice}"
    if _near(factor * gain, ones, unit):
        return f"the gain of {norm} was taken from the norm and not folded into {weight}"
    for offset, words in ((-1.0, "1 + w was folded as w"), (1.0, "w was folded as 1 + w")):
        if _near(factor * gain, gain + offset, unit * float((gain.abs() + 1).max())):
            return f"wrong gain convention of {norm} in {weight}: {words}"
    return f"{weight} is scaled by a factor for each channel that is no power of the gain of {norm}"


def _odd_one_out(ours: Tensor, theirs: Tensor, unit: float) -> int | None:
    """The only expert of a stack (experts, rows, width) that differs."""
    if ours.dim() != 3:
        return None
    wrong = [i for i in range(len(ours)) if not _near(theirs[i], ours[i], unit)]
    return wrong[0] if len(wrong) == 1 and len(ours) > 1 else None


def _tied_embedding(name: str, reference: nn.Module, candidate: nn.Module, sites: Sequence[Site]) -> str:
    """A final norm folded into a head that is the input embedding as well."""
    group = next((g for g in tied_groups(candidate) if f"{name}.weight" in g and len(g) > 1), None)
    own, other = (_parameter(model, f"{name}.weight") for model in (reference, candidate))
    if group is None or own is None or other is None or own.shape != other.shape:
        return ""
    unit = _ROUNDINGS * torch.finfo(own.dtype).eps / 2
    for site in sites:
        gain = _gain(site, reference)
        if gain is not None and len(gain) == own.shape[-1] and _near(other.double(), own.double() * gain, unit):
            return f"{site.norm} was folded into a head that shares its weight with {name}: untie it, or leave the norm"
    return ""


def _scalar_cause(parting: Parting, reference: nn.Module, sites: Sequence[Site]) -> str:
    assert parting.first is not None
    if parting.exact is None or parting.candidate is None or parting.normed is None:
        return ""
    site = next((s for s in sites if s.norm == norm_of(sites).get(parting.first.name)), None)
    if site is None or site.convention is None or site.convention.subtracts_mean:
        return ""
    gain = _gain(site, reference)
    bare = parting.normed.double() / (gain if gain is not None else 1.0)
    exact, other = parting.exact.double(), parting.candidate.double()
    unsure = SIGMAS * parting.first.reference
    if parting.first.name == site.norm:  # the gain may be in either place: what is common to all tokens is no scalar
        other = other * _same_gain(other, exact, gain)
    scale = (other * exact).sum(-1) / exact.square().sum(-1)
    if not _near(other, exact * scale[:, None], unsure):
        return ""
    return _scale_words(scale, bare.square().mean(-1), site, unsure)


def _same_gain(other: Tensor, exact: Tensor, gain: Tensor | None) -> Tensor:
    """What the candidate's normed value is to be multiplied by to have the gain that the exact one has."""
    ones = torch.ones_like(exact[0])
    if gain is None:
        return ones
    kept, moved = ((other * factor / exact).median(0).values for factor in (ones, gain))
    return gain if float(moved.std() / moved.mean().abs()) < float(kept.std() / kept.mean().abs()) else ones


def _scale_words(scale: Tensor, square: Tensor, site: Site, unsure: float) -> str:
    assert site.convention is not None
    share = 1 / square - 1  # ε/m
    if site.convention.eps and _near(scale, torch.rsqrt(site.convention.eps / share + site.convention.eps), unsure):
        return f"the scale of {site.norm} is applied twice"
    telling = 4 * unsure < share
    if not telling.any():
        return ""
    alpha, error = ((1 / (scale.square() * square) - 1) / share)[telling], (2 * unsure / share)[telling]
    if bool((alpha.abs() <= error).all()):
        return f"epsilon of {site.norm} was dropped"
    middle = float((alpha / error).sum() / (1 / error).sum())
    if bool(((alpha - middle).abs() <= error * (1 + abs(middle))).all()):
        return f"epsilon of {site.norm} is {middle:.3g} times what it should be"
    return ""


def _gain(site: Site, model: nn.Module) -> Tensor | None:
    weight = _parameter(model, site.weight) if site.weight else None
    return None if weight is None or site.convention is None else gain_of(site, weight).double()


def _parameter(model: nn.Module, name: str) -> Tensor | None:
    return dict(model.named_parameters(remove_duplicate=False)).get(name)


def _near(values: Tensor, exact: Tensor, unit: float) -> bool:
    return bool((values - exact).norm() <= unit * exact.norm())
