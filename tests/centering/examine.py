"""One architecture: every verdict of centering, the logits after it, and what a forced centering changes."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from flashnorm.errors import TracingError
from flashnorm.passes.center import apply_center, report_of
from flashnorm.sites.centering import Centering, CenteringAudit, audit_centering
from flashnorm.sites.tying import has_tied_head
from flashnorm.verify.oracle import everything_in
from tests import zoo
from tests.cancelling.examine import TOLERANCE, change, in_fp64, logits, unnumbered, with_small_embeddings


@dataclass(frozen=True)
class Outcome:
    """What centering did to one tiny model. Norms of layers that are alike in name are taken together."""

    model_type: str
    layer_norms: bool = False  # whether any norm subtracts a mean
    centered: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)  # those that take an untied head
    keeps_bias: dict[str, str] = field(default_factory=dict)  # norm -> why its bias does not move on
    no: dict[str, str] = field(default_factory=dict)  # LayerNorm -> why not, with an untied head
    error: float = 0.0  # relative error of the fp64 logits, the larger one of both heads
    error_small: float = 0.0  # the same with embeddings of RMS 1e-4
    over_cautious: list[str] = field(default_factory=list)  # refused, yet forcing it changes nothing
    unforced: list[str] = field(default_factory=list)  # refused, and not forced since text does not run them
    refused: str = ""  # why the model could not be traced

    @property
    def right(self) -> bool:
        return all(error <= TOLERANCE for error in (self.error, self.error_small))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(model_type: str, force: bool = True) -> Outcome:
    """Center the tiny causal model of `model_type`; raises `CannotBuild` as the zoo does.

    `force`: also center for every LayerNorm that was refused, one at a time.
    """
    model = zoo.tiny_model("causal", model_type)
    tied = has_tied_head(model)
    try:
        audit = audit_centering(model)
        freed = audit_centering(model, untie=True) if tied else audit
    except TracingError as refusal:
        return Outcome(model_type, refused=str(refusal))
    if not any(probe.convention.subtracts_mean for probe in audit.probes.values()):
        return Outcome(model_type)
    model, inputs = in_fp64(model)
    small = with_small_embeddings(model)
    before = logits(model, inputs), logits(small, inputs)
    ways = [(audit, False), (freed, True)] if tied else [(audit, False)]
    chosen = [[c for c in way.centerings if c.centerable] for way, _ in ways]
    errors = [
        [moved(m, some, *way, inputs, was) for m, was in zip((model, small), before, strict=True)]
        for way, some in zip(ways, chosen, strict=True)
    ]
    running = _running(model, inputs)
    cautious = {n for way in ways for n in _over_cautious(model, *way, inputs, before[0], running)} if force else set()
    as_it_is = {unnumbered(c.norm) for c in chosen[0]}
    return Outcome(
        model_type,
        layer_norms=True,
        centered=sorted(as_it_is),
        untied=sorted({unnumbered(c.norm) for c in chosen[-1]} - as_it_is),
        keeps_bias=_distinct(report_of(freed, {}).keeps_bias),
        no=_distinct({c.norm: c.reason for c in refused(freed)}),
        error=max(error for error, _ in errors),
        error_small=max(error for _, error in errors),
        over_cautious=sorted(cautious),
        unforced=sorted({unnumbered(c.norm) for c in refused(freed) if c.norm not in running}),
    )


def moved(
    model: nn.Module,
    chosen: list[Centering],
    audit: CenteringAudit,
    untie: bool,
    inputs: dict[str, Any],
    before: torch.Tensor,
) -> float:
    """Relative change of the logits."""
    centered = copy.deepcopy(model)
    with everything_in(torch.float64):
        apply_center(centered, chosen, audit, untie=untie)
    return change(before, logits(centered, inputs))


def refused(audit: CenteringAudit) -> list[Centering]:
    """The LayerNorms that stay what they are."""
    return [c for c in audit.centerings if not c.centerable and audit.probes[c.norm].convention.subtracts_mean]


def _over_cautious(
    model: nn.Module,
    audit: CenteringAudit,
    untie: bool,
    inputs: dict[str, Any],
    before: torch.Tensor,
    running: set[str],
) -> list[str]:
    """Refused LayerNorms, one of each name, that could have been centered."""
    some = [c for c in refused(audit) if c.norm not in audit.irregular and c.norm in running]
    distinct = {unnumbered(c.norm): c for c in reversed(some)}
    return [c.norm for c in distinct.values() if moved(model, [c], audit, untie, inputs, before) <= TOLERANCE]


def _running(model: nn.Module, inputs: dict[str, Any]) -> set[str]:
    """The modules that these inputs run."""
    ran: set[str] = set()
    watched = copy.deepcopy(model)
    for name, module in watched.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    logits(watched, inputs)
    return ran


def _distinct(reasons: dict[str, str]) -> dict[str, str]:
    """Norms, without numbers -> the reason of the first."""
    found: dict[str, str] = {}
    for norm, reason in reasons.items():
        found.setdefault(unnumbered(norm), unnumbered(reason))
    return found
