"""Readers that an audit of the model cannot see, because the model does not run them, and a folder shows all the same.

A sentence-transformers folder is loaded without its head, so the last hidden state is what the model is for. And a
checkpoint may store layers that Transformers does not load and an engine runs: those of multi-token prediction read the
last hidden state and share the head with the model. Both see the gain that stands before the head. And where tensors
lie beside a norm's gain that the model does not load, another program knows another layer there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from transformers import PreTrainedModel

from flashnorm.checkpoint.conversion import Placement
from flashnorm.checkpoint.remarks import PIPELINE
from flashnorm.checkpoint.source import Source
from flashnorm.errors import Refusal
from flashnorm.sites.audit import AuditReport, report_of, trace_fully
from flashnorm.sites.types import Blocker, Site

_SHOWN = 2


def with_outside_readers(
    source: Source,
    model: PreTrainedModel,
    report: AuditReport,
    placed: Mapping[str, list[Placement]],
    *,
    untie: bool,
) -> AuditReport:
    """`report` with a blocker at every norm that something outside `model` reads, or that is another layer there.

    `placed`: where each stored tensor that the loader uses goes. `untie`: the head is to be parted from the
    embedding, which is done for the norm before it alone: raises `Refusal` where that is such a norm.
    """
    report = _blocked(report, _unread_beside(source, model, placed))
    if PIPELINE in source.files:
        report = _blocked(report, _without_head(model))
    unread = unread_matrices(source, placed)
    if not unread:
        return report
    heads = _head_names(model)

    def read_by_head(site: Site) -> tuple[Blocker, ...]:
        wide = [name for name in unread if site.width in source.tensors[name].shape]
        if not wide or not any(consumer.weight in heads for consumer in site.consumers):
            return ()
        more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
        detail = (
            f"the checkpoint stores {', '.join(wide[:_SHOWN])}{more}, which {type(model).__name__} does not load: an "
            "engine that runs such layers (multi-token prediction) gives them this norm's output and the same head"
        )
        if untie:
            raise Refusal(
                f"{source.folder}: {detail}, so untying would change what those compute; leave --untie out, or "
                "remove them from the checkpoint if nothing uses them"
            )
        return (Blocker("outside", "", "", detail),)

    return _blocked(report, read_by_head)


def unread_matrices(source: Source, placed: Container[str]) -> list[str]:
    """Stored tensors that the loader leaves out and that could be weights: no tables of frequencies, no masks."""
    return [
        name
        for name, info in source.tensors.items()
        if name not in placed and len(info.shape) >= 2 and info.shape[0] > 1 and info.dtype.is_floating_point
    ]


def _unread_beside(
    source: Source, model: PreTrainedModel, placed: Mapping[str, list[Placement]]
) -> Callable[[Site], tuple[Blocker, ...]]:
    """What is stored beside a norm's gain, under the same module, and left out by the loader.

    A DyT in a folder whose config names a stock architecture is stored so: its slope and its bias lie beside what the
    loader takes for the gain of an RMSNorm. Folding that gain alone would leave a bias that was to be divided by it.
    """
    homes = {piece.parameter: name for name, pieces in placed.items() for piece in pieces}
    unread: dict[str, list[str]] = {}
    for name, info in source.tensors.items():
        if name not in placed and info.dtype.is_floating_point:
            unread.setdefault(name.rpartition(".")[0], []).append(name)

    def blockers(site: Site) -> tuple[Blocker, ...]:
        home = homes.get(site.weight or "")
        beside = unread.get(home.rpartition(".")[0], []) if home else []
        if not beside:
            return ()
        detail = (
            f"the checkpoint stores {' and '.join(sorted(beside)[:_SHOWN])} beside its gain, which "
            f"{type(model).__name__} does not load, so what the layer was trained as is unknown; give the folder the "
            "code of its own model, and --trust-remote-code"
        )
        return (Blocker("outside", "", "", detail),)

    return blockers


def _without_head(model: PreTrainedModel) -> Callable[[Site], tuple[Blocker, ...]]:
    """What stands in a norm's way once the model ends at its last hidden state."""
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    if base is model:
        return lambda site: ()
    inner = {site.norm: site for site in report_of(base, trace_fully(base)).sites}

    def blockers(site: Site) -> tuple[Blocker, ...]:
        there = inner.get(site.norm.removeprefix(prefix))
        found = () if there is None or there.foldable else there.blockers
        return tuple(
            replace(b, detail=f"sentence-transformers loads the model without its head, and then {b.detail}")
            for b in found
        )

    return blockers


def _head_names(model: PreTrainedModel) -> set[str]:
    """The names of the output embedding's weight, if there is one."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if weight is head}


def _blocked(report: AuditReport, blockers: Callable[[Site], tuple[Blocker, ...]]) -> AuditReport:
    sites = tuple(
        replace(site, blockers=(*site.blockers, *blockers(site))) if site.foldable else site for site in report.sites
    )
    return replace(report, sites=sites)
