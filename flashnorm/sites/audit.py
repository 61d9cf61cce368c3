"""`flashnorm.audit`: every norm of a model, how it works, who reads it, and what stands in the way of folding it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flashnorm.errors import Refusal, TracingError
from flashnorm.sites.assemble import assemble
from flashnorm.sites.build import hollow_model, read_config
from flashnorm.sites.hollow import hollow_copy, hollow_inputs
from flashnorm.sites.inputs import Run, main_runs, one_row, part_runs
from flashnorm.sites.probe_cache import ProbeCache
from flashnorm.sites.tracing import Trace, can_run, trace
from flashnorm.sites.tying import untie_head
from flashnorm.sites.types import Site

# Longer and longer inputs, until every expert of a mixture has been seen reading.
_TOKEN_LADDER = (6, 64, 512)


@dataclass(frozen=True)
class AuditReport:
    """The sites of one model, in the order of its modules."""

    model_type: str
    sites: tuple[Site, ...]
    # parameter -> all names under which the model holds it; more than one where weights are tied
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"{self.model_type}: {len(self.foldable)} of {len(self.sites)} norms can be folded"

    @property
    def foldable(self) -> list[Site]:
        """Sites whose gain can be folded into all of their readers."""
        return [site for site in self.sites if site.foldable]

    @property
    def blocked(self) -> list[Site]:
        """Sites with a gain that cannot be folded."""
        return [site for site in self.sites if not site.foldable and site.weight is not None]

    @property
    def skipped(self) -> dict[str, str]:
        """Norm name -> why it is not folded."""
        return {site.norm: site.reason for site in self.sites if not site.foldable}


def audit(
    model: nn.Module | str | os.PathLike[str],
    *,
    inputs: dict[str, Any] | None = None,
    untie: bool = False,
    trust_remote_code: bool = False,
) -> AuditReport:
    """Audit a live model, or a checkpoint folder by its config alone (no weights are read, whatever its size).

    `inputs`: keyword arguments of one forward call, for models that take unusual ones; as the model itself takes them,
    on any device and in its dtype. `untie`: audit the model as it
    would be with its head untied. Raises `ConfigError` where the folder's model cannot be built, `TracingError`
    where it cannot be run, and `Refusal` for a model that is accelerated.
    """
    hollow = hollow_of(model, trust_remote_code)
    if untie:
        untie_head(hollow)
    live = model if isinstance(model, nn.Module) else None
    return report_of(hollow, trace_fully(hollow, inputs, live))


def hollow_of(model: nn.Module | str | os.PathLike[str], trust_remote_code: bool = False) -> nn.Module:
    """The hollow copy of a live model, or the hollow model of a checkpoint folder.

    Raises `ConfigError`, and `Refusal` for a model that is accelerated.
    """
    if isinstance(model, nn.Module):
        if "unaccelerate" in vars(model):
            raise Refusal("the model is accelerated, so its norms stand elsewhere; call model.unaccelerate() first")
        return hollow_copy(model)
    return hollow_model(read_config(model, trust_remote_code), trust_remote_code)


def trace_fully(hollow: nn.Module, inputs: dict[str, Any] | None = None, live: nn.Module | None = None) -> Trace:
    """Trace text through the whole model, with as few tokens as will do, and then every part that text does not reach.

    A mixture of experts may need more tokens before every expert has been seen reading. `live`: as for `trace`.
    """
    if inputs is not None:
        return trace(hollow, [Run(hollow_inputs(inputs))], live)
    cache = ProbeCache()
    runs = _first_that_runs(hollow, _TOKEN_LADDER[0])
    alone = False  # whether the model takes one row at a time
    try:
        record = trace(hollow, runs, live, cache)
    except TracingError:
        runs, alone = [one_row(run) for run in runs], True
        if not can_run(hollow, runs[0]):
            raise
        record = trace(hollow, runs, live, cache)
    for tokens in _TOKEN_LADDER[1:]:
        longer = _first_that_runs(hollow, tokens) if _unseen(record) else []
        longer = [one_row(run) for run in longer] if alone else longer
        # What a run longer than the model's positions leaves unseen stays a blocker.
        if not longer or not can_run(hollow, longer[0]):
            break
        runs = longer
        record = trace(hollow, runs, live, cache)
    parts = [run for run in part_runs(hollow, record.called) if can_run(hollow, run)]
    return trace(hollow, [*runs, *parts], live, cache) if parts else record


def _first_that_runs(hollow: nn.Module, tokens: int) -> list[Run]:
    """The first of the main runs that goes through; the very first, for its error, if none does."""
    try:
        candidates = main_runs(hollow, tokens)
    except Exception as error:  # model code is third-party code and may raise anything
        raise TracingError(f"no inputs could be made for {type(hollow).__name__}: {error}; pass inputs=...") from error
    if len(candidates) == 1:
        return candidates
    return [next((run for run in candidates if can_run(hollow, run)), candidates[0])]


def _unseen(record: Trace) -> bool:
    return any(blocker.kind == "unseen" for site in assemble(record) for blocker in site.blockers)


def report_of(hollow: nn.Module, record: Trace) -> AuditReport:
    config = getattr(hollow, "config", None)
    aliases = {name: tuple(names) for name, names in record.ledger.aliases.items()}
    return AuditReport(getattr(config, "model_type", type(hollow).__name__), tuple(assemble(record)), aliases)
