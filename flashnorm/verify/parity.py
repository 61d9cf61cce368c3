"""Parity: the subject's logits against a reference's in exact arithmetic, and where the two part first.

The bounds are those of `flashnorm.verify.bounds`: the candidate may lie as far from the exact logits as the reference
does in the same dtype, with one more rounding of its weights. Where that fails, `flashnorm.verify.parting` finds the
first module whose output differs, and `flashnorm.verify.causes` looks for a mistake that it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashnorm.errors import FlashnormError
from flashnorm.sites.audit import audit
from flashnorm.sites.types import Site
from flashnorm.verify.causes import likely_cause, norm_of
from flashnorm.verify.checks import divergence_check, drift_check
from flashnorm.verify.divergence import kl_divergence, top1_agreement
from flashnorm.verify.drift import squared_drift
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.forward import TransformersModel
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.parting import Parting, find_parting, place_of
from flashnorm.verify.report import Check
from flashnorm.verify.subject import Subject

_POSITIONS = 128


@dataclass(frozen=True)
class Reference:
    """What the subject is compared with. `engine` has an oracle; `load`: a private copy of its model.

    `candidate`: the subject's model, None where it is no module; `runs_exactly`: whether it may be upcast.
    """

    engine: Engine
    load: Callable[[], TransformersModel]
    candidate: Callable[[], TransformersModel] | None = None
    runs_exactly: bool = True


def check_parity(engine: Engine, ids: Tensor, reference: Reference | None) -> Outcome:
    """`ids`: (count,), of which the first `_POSITIONS` count."""
    if reference is None:
        return Outcome("parity", skipped="there is nothing to compare with; give --reference DIR")
    assert reference.engine.exact is not None
    ids = ids[None, :_POSITIONS]
    exact = reference.engine.exact(ids)[0]
    own, theirs = (of.fresh(ids)[0].cpu() for of in (reference.engine, engine))
    bad = int((~theirs.isfinite()).any(-1).sum())
    figures = [Check("non_finite_positions", bad, 0, f"the logits are not finite at {bad} positions")]
    series: dict[str, list[object]] = {}
    notes: list[str] = []
    if not bad:
        kl = kl_divergence(exact, theirs)
        figures += [
            drift_check(squared_drift(theirs, exact), squared_drift(own, exact)),
            divergence_check(kl, kl_divergence(exact, own)),
        ]
        series = {"position": list(range(len(kl))), "divergence": kl.tolist()}
        notes.append(f"top-1 agreement with the exact logits: {top1_agreement(theirs, exact):.2%}")
    failed = not all(figure.passed for figure in figures)
    place, cause = "", ""
    if reference.candidate is not None:
        parting, sites = _part(reference, ids[0])
        series |= {
            "layer": [module.name for module in parting.modules],
            "layer_error": [module.candidate for module in parting.modules],
        }
        if failed and parting.first is not None:
            place = f"the models part first at {parting.place} ({parting.first.name}), whose output differs by "
            place += f"{parting.first.candidate:.3g} where rounding makes {parting.first.reference:.3g}"
            cause = likely_cause(parting, reference.load(), reference.candidate(), sites)
        elif failed:
            place = "no module's output differs: the models part in what they do between modules, or in the cache"
    return Outcome("parity", tuple(_placed(figures, place)), "", tuple(notes), cause, series)


def _part(reference: Reference, ids: Tensor) -> tuple[Parting, tuple[Site, ...]]:
    assert reference.candidate is not None
    sites = sites_of(reference.load())
    parting = find_parting(
        reference.load, reference.candidate, ids, norm_of(sites), exact_candidate=reference.runs_exactly
    )
    return parting, sites


def sites_of(model: nn.Module) -> tuple[Site, ...]:
    """The model's norms and their readers.

    Without an audit, norms are compared like any other module, and causes are not looked for.
    """
    try:
        return audit(model).sites
    except FlashnormError:
        return ()


def _placed(figures: list[Check], place: str) -> list[Check]:
    return [Check(f.name, f.value, f.bound, f"{f.meaning}; {place}" if place else f.meaning) for f in figures]


def where_they_part(ours: Subject, theirs: Subject, ids: Tensor, oracle: torch.dtype) -> str:
    """For two subjects whose logits differ: one sentence that says where first, and why where that is known.

    `ids`: (length,). Loads both once more, and compares them module by module.
    """

    def reference() -> TransformersModel:
        return ours.load(None)

    def candidate() -> TransformersModel:
        return theirs.load(None)

    sites = sites_of(reference())
    parting = find_parting(reference, candidate, ids, norm_of(sites), oracle=oracle)
    if parting.first is None:
        return ""
    cause = likely_cause(parting, reference(), candidate(), sites)
    return f"the models part first at {place_of(parting.first.name)} ({parting.first.name})" + (
        f"; likely cause: {cause}" if cause else ""
    )
