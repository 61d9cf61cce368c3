"""From an opened checkpoint to its fold plan: run its model's own code without weights, and untie it if asked."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from flashnorm.checkpoint.conversion import placements, stored_name
from flashnorm.checkpoint.missing import missing_weights, refuse_missing
from flashnorm.checkpoint.new_biases import room_for_biases
from flashnorm.checkpoint.outside import with_outside_readers
from flashnorm.checkpoint.plan import STRICT_MARK, FoldPlan, NewBias, changed
from flashnorm.checkpoint.planner import plan_fold
from flashnorm.checkpoint.source import Source
from flashnorm.errors import Refusal
from flashnorm.sites.audit import report_of, trace_fully
from flashnorm.sites.build import hollow_model, read_config
from flashnorm.sites.tracing import Trace
from flashnorm.sites.tying import has_tied_head, tie_flags, tied_groups, untie_head


def make_plan(
    source: Source,
    *,
    strict: bool = False,
    untie: bool = False,
    add_bias: bool = False,
    trust_remote_code: bool = False,
) -> FoldPlan:
    """Audit the model of an opened checkpoint and plan its fold; the options as for `fold_checkpoint`."""
    config = read_config(source.folder, trust_remote_code)
    model = hollow_model(config, trust_remote_code)
    additions: dict[str, str] = {}
    changes: dict[tuple[str, ...], object] = {}
    shapes = {name: tuple(info.shape) for name, info in source.tensors.items()}
    placed = placements(model, shapes)
    refuse_missing(source.folder, model, {piece.parameter for pieces in placed.values() for piece in pieces})
    new_biases: dict[str, NewBias] = {}
    if add_bias:
        room = room_for_biases(source, config, model, _homes(model, shapes), trust_remote_code)
        changes, new_biases, model = dict(room.config_changes), room.biases, room.model
        shapes.update({name: (bias.size,) for name, bias in new_biases.items()})
        placed = placements(model, shapes)
        lost = missing_weights(model, {piece.parameter for pieces in placed.values() for piece in pieces})
        if lost:  # a conversion of the loader's that knows weights alone
            raise Refusal(f"{source.folder}: a stored {lost[0]} would not be loaded; leave --add-bias out")
    if untie:
        changes |= tie_flags(config, source.config)
        apart = hollow_model(type(config).from_dict(changed(source.config, changes)), trust_remote_code)
        additions = _copies(source, model, apart, shapes)
        shapes.update({name: shapes[origin] for name, origin in additions.items()})
        untie_head(model)
        placed = placements(model, shapes)
    record = trace_fully(model)
    if untie:
        refuse_another_function(source, record, apart)
    report = with_outside_readers(source, model, report_of(model, record), placed, untie=untie)
    if strict:
        changes |= STRICT_MARK
    return plan_fold(
        source,
        report,
        placed,
        strict=strict,
        untied=untie,
        additions=additions,
        config_changes=changes,
        new_biases=new_biases,
    )


def _copies(
    source: Source, tied: PreTrainedModel, apart: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """The tensors to add so that the model with its tie flags off finds all its weights: name -> copied from.

    A tied checkpoint may store the weight under any of its names; whichever are missing become copies of that one.
    Raises `Refusal` where nothing is tied, or none of the names is stored.
    """
    groups = tied_groups(tied)
    if not has_tied_head(tied):
        raise Refusal(f"{source.folder} has no tied head, so there is nothing to untie; leave --untie out")
    together = {name: group for group in groups for name in group if len(group) > 1}
    homes = _homes(tied, shapes)
    there = _homes(apart, shapes)
    found = {}
    for names in tied_groups(apart):
        tied_to = next((together[name] for name in names if name in together), [])
        if not tied_to or any(name in there for name in names):
            continue
        origin = next((homes[name] for name in tied_to if name in homes), None)
        if origin is None:
            raise Refusal(
                f"{source.folder} stores neither {names[0]} nor anything that it is tied to, so it cannot be untied; "
                "restore the missing weight"
            )
        found[stored_name(apart, names[0])] = origin
    return found


def _homes(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Parameter -> the stored tensor that it is loaded from."""
    return {piece.parameter: name for name, pieces in placements(model, shapes).items() for piece in pieces}


def refuse_another_function(source: Source, tied: Trace, apart: PreTrainedModel) -> None:
    """Some models stay tied whatever the flag says, or compute something else when it is off: do not untie those."""
    kept = has_tied_head(apart)
    if kept or trace_fully(apart).operations != tied.operations:
        what = "stays tied" if kept else "computes something else"
        raise Refusal(
            f"{source.folder}: {type(apart).__name__} {what} when tie_word_embeddings is off, so its head cannot be "
            "untied; leave --untie out"
        )
