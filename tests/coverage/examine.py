"""One architecture: save, fold on disk, reload with stock Transformers, compare; and force every refused fold."""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.errors import Refusal
from flashnorm.passes.fold import apply_fold
from flashnorm.sites.audit import AuditReport, audit
from flashnorm.sites.types import Site
from tests import zoo
from tests.zoo.quirks import BROKEN_ROUND_TRIP

# fp32 against fp32: both models round the same sums in another order. The bound, ten times what is measured.
TOLERANCE = 1e-5
# Kinds of blocker that speak of what the trace could not see; forcing them may well change nothing.
NOT_SEEN = {"unreached", "unseen"}


@dataclass(frozen=True)
class Outcome:
    """What folding did to one tiny model. `error`: relative error of the logits after reload."""

    model_type: str
    norms: int  # norms with a gain
    folded: int
    error: float
    blocked: dict[str, int] = field(default_factory=dict)  # kind of blocker -> norms
    over_cautious: list[str] = field(default_factory=list)  # refused, yet forcing the fold changes nothing
    on_disk: bool = True  # False where stock Transformers itself does not restore the tiny model it saved

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(family: str, model_type: str, folder: Path) -> Outcome:
    """Fold the tiny model of `model_type` and compare. Raises what the zoo raises when it cannot be built."""
    model = zoo.tiny_model(family, model_type)
    inputs = zoo.forward_inputs(model, family)
    before = zoo.logits(model, inputs)
    report = audit(model)
    on_disk = model_type not in BROKEN_ROUND_TRIP
    after = _fold_on_disk(model, inputs, folder) if on_disk else _fold_in_memory(model, inputs, report)
    kinds = Counter(site.blockers[0].kind for site in report.blocked)
    return Outcome(
        model_type=model_type,
        norms=len(report.foldable) + len(report.blocked),
        folded=len(report.foldable),
        error=_relative_error(after, before),
        blocked=dict(sorted(kinds.items())),
        over_cautious=[site.norm for site in _distinct(report) if _changes_nothing(model, site, inputs, before)],
        on_disk=on_disk,
    )


def _fold_on_disk(model: torch.nn.Module, inputs: dict[str, Any], folder: Path) -> torch.Tensor:
    model.save_pretrained(folder / "source")
    try:
        fold_checkpoint(folder / "source", folder / "folded")
    except Refusal as refusal:
        if "nothing in" not in str(refusal):
            raise
        return zoo.logits(model, inputs)
    return zoo.logits(type(model).from_pretrained(folder / "folded").eval(), inputs)


def _fold_in_memory(model: torch.nn.Module, inputs: dict[str, Any], report: AuditReport) -> torch.Tensor:
    folded = copy.deepcopy(model)
    apply_fold(folded, report.foldable)
    return zoo.logits(folded, inputs)


def _distinct(report: AuditReport) -> list[Site]:
    """One blocked site of each name and kind of obstacle: layers repeat."""
    found = {
        (re.sub(r"\.\d+\b", "", site.norm), site.blockers[0].kind): site
        for site in reversed(report.blocked)
        if site.blockers[0].kind not in NOT_SEEN
    }
    return list(found.values())


def _changes_nothing(model: torch.nn.Module, site: Site, inputs: dict[str, Any], before: torch.Tensor) -> bool:
    forced = copy.deepcopy(model)
    apply_fold(forced, [site])
    return _relative_error(zoo.logits(forced, inputs), before) <= TOLERANCE


def _relative_error(after: torch.Tensor, before: torch.Tensor) -> float:
    return ((after.double() - before.double()).norm() / before.double().norm()).item()
