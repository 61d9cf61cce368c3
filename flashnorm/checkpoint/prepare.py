"""From an opened checkpoint to its fold plan: run its model's own code without weights, and untie it if asked."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from flashnorm.checkpoint.conversion import placements, stored_name
from flashnorm.checkpoint.plan import FoldPlan
from flashnorm.checkpoint.planner import plan_fold
from flashnorm.checkpoint.source import Source
from flashnorm.errors import Refusal
from flashnorm.sites.audit import report_of, trace_fully
from flashnorm.sites.build import hollow_model, read_config
from flashnorm.sites.tracing import Trace
from flashnorm.sites.tying import tie_flags, untie_head, without_ties


def make_plan(
    source: Source, *, strict: bool = False, untie: bool = False, trust_remote_code: bool = False
) -> FoldPlan:
    """Audit the model of an opened checkpoint and plan its fold."""
    config = read_config(source.folder, trust_remote_code)
    model = hollow_model(config, trust_remote_code)
    additions: dict[str, str] = {}
    changes: dict[tuple[str, ...], object] = {}
    shapes = {name: tuple(info.shape) for name, info in source.tensors.items()}
    if untie:
        additions, changes = _untie(source, model, config)
        shapes.update({name: shapes[origin] for name, origin in additions.items()})
    record = trace_fully(model)
    if untie:
        _refuse_another_function(source, record, hollow_model(without_ties(config), trust_remote_code))
    report = report_of(model, record)
    placed = placements(model, shapes)
    if strict:
        changes[("flashnorm",)] = {"mode": "strict"}
    return plan_fold(source, report, placed, strict=strict, additions=additions, config_changes=changes)


def _untie(source: Source, model: PreTrainedModel, config: Any) -> tuple[dict[str, str], dict[tuple[str, ...], object]]:
    """Untie `model` in place; the stored tensors to add (name -> copied from) and the tie flags to change."""
    heads = untie_head(model)
    if not heads:
        raise Refusal(f"{source.folder} has no tied head, so there is nothing to untie; leave --untie out")
    placed = placements(model, {name: tuple(info.shape) for name, info in source.tensors.items()})
    homes = {piece.parameter: name for name, pieces in placed.items() for piece in pieces}
    additions = {stored_name(model, head): homes[embedding] for head, embedding in heads.items() if head not in homes}
    return additions, tie_flags(config)


def _refuse_another_function(source: Source, tied: Trace, untied: PreTrainedModel) -> None:
    """Some models stay tied whatever the flag says, or compute something else when it is off: do not untie those."""
    kept = untie_head(untied)
    if kept or trace_fully(untied).operations != tied.operations:
        what = "stays tied" if kept else "computes something else"
        raise Refusal(
            f"{source.folder}: {type(untied).__name__} {what} when tie_word_embeddings is off, so its head cannot be "
            "untied; leave --untie out"
        )
