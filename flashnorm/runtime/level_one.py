"""Level one, for any architecture: every norm that provably can moves into the linears that read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from flashnorm.runtime.checking import Watch, require_formula
from flashnorm.runtime.observing import Observation, Probe, find_probe, observe
from flashnorm.runtime.planning import Plan, Product, Stock, plan_site
from flashnorm.runtime.replace import Replaced, release_cached_memory, replace
from flashnorm.runtime.report import SiteReport
from flashnorm.sites.audit import AuditReport, audit


@dataclass
class LevelOne:
    """The sites that were replaced, and a line on every norm."""

    replaced: list[Replaced]
    sites: tuple[SiteReport, ...]


def apply_level_one(model: nn.Module) -> LevelOne:
    """Replace what can be replaced, in place, check it on a probe, and put back what differs.

    Raises what `flashnorm.audit` raises, and `TracingError` where the model cannot be run.
    """
    report = audit(model)
    probe = find_probe(model)
    seen = observe(model, probe, {site.norm for site in report.sites})
    reasons: dict[str, str] = {}
    plans = _plans(model, report, seen, reasons)
    done: list[Replaced] = []
    try:
        done += (replace(model, plan) for plan in plans)
        kept = _checked(model, probe, done, reasons)
        release_cached_memory(model)
    except BaseException:
        undo_level_one(model, done)
        raise
    products = {replaced.plan.norm: tuple(map(_described, replaced.plan.products)) for replaced in kept}
    lines = [SiteReport(s.norm, products.get(s.norm, ()), reasons.get(s.norm, "")) for s in report.sites]
    return LevelOne(kept, tuple(lines))


def undo_level_one(model: nn.Module, replaced: list[Replaced]) -> None:
    """Restore the original modules, the last one first."""
    for site in reversed(replaced):
        site.undo()
    release_cached_memory(model)


def _plans(model: nn.Module, report: AuditReport, seen: Observation, reasons: dict[str, str]) -> list[Plan]:
    """What is to be done, all of it decided on the stock model; `reasons` takes down why not."""
    plans = []
    for site in report.sites:
        try:
            plan = plan_site(model, site, report, seen)
            require_formula(model, plan, seen)
        except Stock as reason:
            reasons[site.norm] = str(reason)
        else:
            plans.append(plan)
    return plans


def _checked(model: nn.Module, probe: Probe, done: list[Replaced], reasons: dict[str, str]) -> list[Replaced]:
    """Run the replaced model and put back the sites of which a module differs in its place."""
    watch = Watch(model)
    with watch.watching():
        probe.run(model)
    kept = []
    for replaced in done:
        worst = max((watch.excess.get(name, 0.0) for name in replaced.names), default=0.0)
        if worst <= 1:
            kept.append(replaced)
            continue
        replaced.undo()
        reasons[replaced.plan.norm] = (
            f"put back: what replaced it differs from RMSNorm and linear by {worst:.3g} times what rounding explains"
        )
    return kept


def _described(product: Product) -> str:
    names = [name.rpartition(".")[2] for name in product.readers]
    if product.gate is None:
        return " + ".join(names)
    if len(names) == 2:
        return f"{product.gate.activation}({names[0]}) * {names[1]}"
    return f"{product.gate.activation}-gated {names[0]}"
