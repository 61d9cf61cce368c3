"""Turn LayerNorms into RMSNorms on a live module: what writes their inputs is centered instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.errors import Refusal
from flashnorm.passes.centered_norm import CenteredNorm
from flashnorm.passes.fold import move_shift, refuse_overflow
from flashnorm.passes.stand_in import check_stand_in, replace_norms
from flashnorm.sites.centering import Centered, Centering, CenteringAudit, audit_centering
from flashnorm.sites.folding import moves_shift
from flashnorm.sites.tying import untie_head
from flashnorm.sites.types import Site


@dataclass(frozen=True)
class CenterReport:
    """What centering did. `centered`: the LayerNorms that are RMSNorms now; `keeps_bias`: those of them whose bias
    could not move on, with the reason; `skipped`: all other norms, with the reason; `untied`: heads that have their own
    weight now, and the embedding with which they shared it."""

    centered: list[str]
    keeps_bias: dict[str, str]
    skipped: dict[str, str]
    untied: dict[str, str]

    def __str__(self) -> str:
        return f"{len(self.centered)} LayerNorms are RMSNorms now, {len(self.skipped)} norms left alone"


def center(model: nn.Module, *, inputs: dict[str, Any] | None = None, untie: bool = False) -> CenterReport:
    """Turn every LayerNorm whose input can be written without its mean into an RMSNorm, in place.

    The linear layers and embeddings that write its input are centered (`algebra.center`), and its bias moves into the
    biases of the layers that read it, where they have one. The model computes the same function afterwards, up to
    rounding; each weight is rounded once, to its own dtype. `inputs`: as for `flashnorm.audit`. `untie`: give a head
    that shares the embedding's weight its own, which most models with such a head need. Raises `Refusal`, with nothing
    changed, where a weight is not in memory, a norm has forward hooks or computes something else in the model's dtype
    than what was found out about it, and what `audit` raises.
    """
    audit = audit_centering(model, inputs=inputs, untie=untie)
    chosen = [c for c in audit.centerings if c.centerable]
    untied = apply_center(model, chosen, audit, untie=untie)
    return report_of(audit, untied)


def report_of(audit: CenteringAudit, untied: dict[str, str]) -> CenterReport:
    """The report on all that the audit allows, done."""
    sites = {site.norm: site for site in audit.readers.sites}
    chosen = [c for c in audit.centerings if c.centerable]
    return CenterReport(
        centered=[c.norm for c in chosen],
        keeps_bias={
            c.norm: _bias_stays(c.norm, sites)
            for c in chosen
            if audit.probes[c.norm].bias is not None and _bias_stays(c.norm, sites)
        },
        skipped={c.norm: c.reason for c in audit.centerings if not c.centerable},
        untied=untied,
    )


@torch.no_grad()
def apply_center(
    model: nn.Module,
    chosen: Iterable[Centering],
    audit: CenteringAudit,
    *,
    untie: bool = False,
    keep_modules: bool = False,
) -> dict[str, str]:
    """Center for the given norms, whatever their verdict: `center` chooses them, tests force them.

    Everything is computed and checked before the model is changed. `keep_modules`: change the parameters alone and
    leave the LayerNorms where they are; they subtract means that are zero then. Returns the heads that were untied.
    """
    chosen = tuple(chosen)
    sites = {site.norm: site for site in audit.readers.sites}
    moving = [sites[c.norm] for c in chosen if audit.probes[c.norm].bias and not _bias_stays(c.norm, sites)]
    parts = {part: None for c in chosen for part in c.writers}
    _refuse_absent(model, [*(p.parameter for p in parts), *_touched(moving)])
    for c in chosen:
        plain = CenteredNorm(model.get_submodule(c.norm), audit.probes[c.norm])
        check_stand_in(model, c.norm, audit.probes[c.norm], plain, centered_inputs=True)
    values = _centered(model, parts, _shifts(model, moving))
    untied = _untie(model) if untie and chosen else {}
    for name, value in values.items():
        model.get_parameter(name).copy_(value)
    if not keep_modules:
        moved = {site.norm for site in moving}
        norms = {model.get_submodule(c.norm): (audit.probes[c.norm], c.norm in moved) for c in chosen}
        replace_norms(model, {norm: CenteredNorm(norm, *how) for norm, how in norms.items()})
    return untied


def _bias_stays(norm: str, sites: dict[str, Site]) -> str:
    """Why the bias of a norm cannot move into the next biases; empty where it can."""
    site = sites.get(norm)
    if site is None or site.shared_with:
        return "other norms have the same bias"
    if site.weight is None:
        return "it has no gain, without which its readers are not followed"
    if site.blockers:
        return site.reason
    if not site.consumers:
        return "nothing reads its output"
    if not moves_shift(site):
        readers = ", ".join(c.weight for c in site.consumers if not c.takes_shift)
        return f"{readers}, which reads it, has no bias that could take it"
    return ""


def _shifts(model: nn.Module, sites: Iterable[Site]) -> dict[str, torch.Tensor]:
    new: dict[str, torch.Tensor] = {}
    for site in sites:
        move_shift(model, site, new)
    return new


def _centered(model: nn.Module, parts: Iterable[Centered], new: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The new values of all parameters that change; `new`: those that have taken a norm's bias already."""
    of_parameter: dict[str, list[Centered]] = defaultdict(list)
    for part in parts:
        of_parameter[part.parameter].append(part)
    values = dict(new)
    for name, along in of_parameter.items():
        value = new.get(name, model.get_parameter(name)).detach().clone()
        for part in along:
            entries = value.narrow(part.axis, part.start, part.stop - part.start)
            entries.copy_(algebra.center(entries, part.axis))
        values[name] = value
    for name, value in values.items():
        refuse_overflow(name, model.get_parameter(name), value, "its mean has been subtracted")
    return values


def _touched(sites: Iterable[Site]) -> list[str]:
    return [n for s in sites for n in (s.bias, *(n for c in s.consumers for n in (c.weight, c.bias))) if n]


def _refuse_absent(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if model.get_parameter(name).is_meta:
            raise Refusal(f"{name} has no values in memory, so it cannot be centered; load the model without offload")


def _untie(model: nn.Module) -> dict[str, str]:
    """Give tied heads weights of their own, of the same values, and tell the config so."""
    untied = untie_head(model)
    for head, embedding in untied.items():
        model.get_parameter(head).copy_(model.get_parameter(embedding))
    for config in _configs(getattr(model, "config", None)) if untied else ():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    return untied


def _configs(config: Any) -> list[Any]:
    """A model's config and all configs of its parts."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(inner for part in parts if part is not None for inner in _configs(part))]
