"""One architecture: save, fold on disk, reload with stock Transformers, compare; and force every refused fold."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.errors import Refusal, TracingError
from flashnorm.passes.fold import apply_fold
from flashnorm.sites.audit import AuditReport, audit
from flashnorm.sites.inputs import Run, part_runs
from flashnorm.sites.tracing import can_run
from flashnorm.sites.types import Site
from tests import zoo
from tests.zoo.quirks import BROKEN_ROUND_TRIP

# fp32 against fp32: both models round the same sums at other places. A sum of K products takes K roundings of random
# sign, each of u = 2^-24 at most, so sqrt(K) u; D weights one behind the other make sqrt(D K) u of it. The longest
# chain in the zoo is D = 175 weights with K = 128, so 8.9e-6. A wrong fold is off by a gain's distance from one, 0.3.
TOLERANCE = 1e-5
# Kinds of blocker that speak of what the trace could not see; forcing them may well change nothing. Where it saw no
# reader, there is none to fold into, and only a caller who takes more than the logits would see the gain go.
NOT_SEEN = {"unreached", "unread", "unseen"}


@dataclass(frozen=True)
class Outcome:
    """What folding did to one tiny model. `error`: relative error of the logits after reload."""

    model_type: str
    norms: int  # norms with a gain
    folded: int
    error: float
    blocked: dict[str, int] = field(default_factory=dict)  # kind of blocker -> norms
    over_cautious: list[str] = field(default_factory=list)  # refused, yet forcing the fold changes nothing
    refused: str = ""  # the reason where the model cannot be traced at all: nothing is written then
    on_disk: bool = True  # False where stock Transformers itself does not restore the tiny model it saved

    @property
    def right(self) -> bool:
        return not self.refused and self.error <= TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Calls:
    """How a tiny model and its folded copies are run: on text, and every tower on its own."""

    inputs: dict[str, Any]
    towers: tuple[Run, ...]
    unreached: tuple[Run, ...]  # those of `towers` that text does not reach


def examine(family: str, model_type: str, model: PreTrainedModel, folder: Path) -> Outcome:
    """Fold a tiny model of `model_type` and compare."""
    calls = _calls(model, zoo.forward_inputs(model, family))
    before = _outputs(model, calls)
    try:
        report = audit(model)
    except TracingError as refusal:
        return Outcome(model_type, norms=0, folded=0, error=0.0, refused=str(refusal))
    on_disk = model_type not in BROKEN_ROUND_TRIP
    after = _fold_on_disk(model, calls, folder) if on_disk else _fold_in_memory(model, calls, report)
    kinds = Counter(site.blockers[0].kind for site in report.blocked)
    return Outcome(
        model_type=model_type,
        norms=len(report.foldable) + len(report.blocked),
        folded=len(report.foldable),
        error=_relative_error(after, before),
        blocked=dict(sorted(kinds.items())),
        over_cautious=[site.norm for site in _distinct(report) if _changes_nothing(model, site, calls, before)],
        on_disk=on_disk,
    )


def _calls(model: torch.nn.Module, inputs: dict[str, Any]) -> _Calls:
    called: set[str] = set()
    hooks = [m.register_forward_pre_hook(lambda *_, name=n: called.add(name)) for n, m in model.named_modules()]
    zoo.logits(model, inputs)
    for hook in hooks:
        hook.remove()
    towers = [run for run in part_runs(model, ()) if can_run(model, run)]
    unreached = [run for run in part_runs(model, called) if can_run(model, run)]
    return _Calls(inputs, tuple(towers), tuple(unreached))


def _fold_on_disk(model: torch.nn.Module, calls: _Calls, folder: Path) -> list[torch.Tensor]:
    model.save_pretrained(folder / "source")
    try:
        fold_checkpoint(folder / "source", folder / "folded")
    except Refusal as refusal:
        if "nothing in" not in str(refusal):
            raise
        return _outputs(model, calls)
    return _outputs(type(model).from_pretrained(folder / "folded").eval(), calls)


def _fold_in_memory(model: torch.nn.Module, calls: _Calls, report: AuditReport) -> list[torch.Tensor]:
    folded = copy.deepcopy(model)
    apply_fold(folded, report.foldable)
    return _outputs(folded, calls)


def _distinct(report: AuditReport) -> list[Site]:
    """One blocked site of each name and kind of obstacle: layers repeat."""
    found = {
        (re.sub(r"\.\d+\b", "", site.norm), site.blockers[0].kind): site
        for site in reversed(report.blocked)
        if site.blockers[0].kind not in NOT_SEEN
    }
    return list(found.values())


def _changes_nothing(model: torch.nn.Module, site: Site, calls: _Calls, before: list[torch.Tensor]) -> bool:
    """Would the fold have been right after all? A right fold is right for any gain, so the gain may be a wild one too:
    an indexer that only ranks tokens shows a small change of its scores in nothing else.
    """
    if _moves(model, site, calls, before):
        return False
    wild = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        with torch.no_grad():
            wild.get_parameter(site.weight or "").normal_(0.0, 3.0, generator=generator)
        if _moves(wild, site, calls, _outputs(wild, calls)):
            return False
    return True


def _moves(model: torch.nn.Module, site: Site, calls: _Calls, before: list[torch.Tensor]) -> bool:
    forced = copy.deepcopy(model)
    apply_fold(forced, [site])
    if _relative_error(_outputs(forced, calls), before) > TOLERANCE:
        return True
    # A tower that the text model takes only a part of returns the rest to whoever calls it on its own.
    return _relative_error(_tower_outputs(forced, calls.towers), _tower_outputs(model, calls.towers)) > TOLERANCE


@torch.no_grad()
def _outputs(model: torch.nn.Module, calls: _Calls) -> list[torch.Tensor]:
    """The logits, and what every tower computes that text does not reach."""
    return [zoo.logits(model, calls.inputs), *_tower_outputs(model, calls.unreached)]


@torch.no_grad()
def _tower_outputs(model: torch.nn.Module, runs: Iterable[Run]) -> list[torch.Tensor]:
    """Everything that towers return when they are called on their own."""
    outputs: list[torch.Tensor] = []
    for run in runs:
        parts = tree_flatten(dict(model.get_submodule(run.module)(**run.inputs)))[0]
        outputs += [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]
    return outputs


def _relative_error(after: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    """The largest relative error of any output, without entries that a model masks out with a huge number.

    Infinite where `after` holds a NaN or another mask, so that it is never taken for right. `before` must hold no NaN.
    """
    errors = [0.0]
    for a, b in zip(after, before, strict=True):
        assert not b.isnan().any(), "the tiny model itself computes NaN, so there is nothing to compare with"
        masked = b.abs() >= _MASKED
        if a.isnan().any() or not torch.equal(a.abs() >= _MASKED, masked):
            return math.inf
        difference = (a[~masked].double() - b[~masked].double()).norm()
        errors.append((difference / b[~masked].double().norm().clamp(min=1e-30)).item())
    return max(errors)


_MASKED = 1e30
