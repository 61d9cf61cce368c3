"""Drop norms that a later norm makes redundant, on a live module; exact in epsilon."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from flashnorm.passes.approximate import EpsilonBound, epsilon_bounds
from flashnorm.passes.carried_norm import Carried, CarriedNorm, Missing, forget
from flashnorm.passes.stand_in import check_stand_in, replace_norms
from flashnorm.sites.cancelling import Cancellation, CancellationAudit, Kept, audit_cancellation
from flashnorm.sites.probing import NormProbe


@dataclass(frozen=True)
class CancelReport:
    """What a cancellation did. `full`: norms that divide no more; `partial`: those of which a part of the readers still
    takes the scalar, with these readers; `skipped`: all others, with the reason."""

    full: list[str]
    partial: dict[str, tuple[str, ...]]
    skipped: dict[str, str]
    # Later norm -> how far it may be off with its own epsilon; where that is more than the limit it was kept exact.
    bounds: dict[str, EpsilonBound] = field(default_factory=dict)
    approximate: tuple[str, ...] = ()  # the later norms that have their own epsilon

    def __str__(self) -> str:
        return f"{len(self.full)} norms dropped, {len(self.partial)} for a part, {len(self.skipped)} left alone"


def cancel(
    model: nn.Module,
    *,
    inputs: dict[str, Any] | None = None,
    approximate: float | None = None,
    calibration: Iterable[Mapping[str, Any]] = (),
) -> CancelReport:
    """Drop every norm that a later norm makes redundant, in place, wholly or for a part of its readers.

    A dropped norm multiplies by its gain and divides by nothing. The norms behind its readers take the missing scalar
    out, with the epsilon of `algebra.carried_epsilon`; readers that no norm follows get it back. The model computes the
    same function afterwards, up to rounding; parameters and their names stay. `inputs`: as for `flashnorm.audit`.
    `approximate`: leave a later norm its own epsilon, as the published method does, where its output is off by no more
    than this, relatively, for every token within the range of `calibration`, keyword arguments of forward calls
    (`passes.approximate`); norms for which that cannot be said stay exact.
    Raises `Refusal`, with nothing changed, where a norm has forward hooks or computes something else in the model's
    dtype than what was found out about it, and what `audit` raises.
    """
    audit = audit_cancellation(model, inputs=inputs)
    chosen = [c for c in audit.cancellations if c.verdict != "no"]
    bounds = {} if approximate is None else epsilon_bounds(model, chosen, audit.probes, calibration)
    rough = tuple(norm for norm, found in bounds.items() if approximate is not None and found.bound <= approximate)
    apply_cancel(model, chosen, audit, rough)
    return CancelReport(
        full=[c.norm for c in chosen if c.verdict == "full"],
        partial={c.norm: tuple(k.reader for k in c.kept) for c in chosen if c.verdict == "partial"},
        skipped={c.norm: c.reason for c in audit.cancellations if c.verdict == "no"},
        bounds=bounds,
        approximate=rough,
    )


def apply_cancel(
    model: nn.Module, chosen: Iterable[Cancellation], audit: CancellationAudit, approximate: Collection[str] = ()
) -> None:
    """Drop the given norms, whatever their verdict: `cancel` chooses them, tests force them.

    `approximate`: later norms that stay as they are, epsilon and all. Everything is built and checked before the model
    is changed.
    """
    chosen = tuple(chosen)
    carried = {c.norm: Carried(c.norm) for c in chosen}
    takes = {
        a.norm: Missing(carried[c.norm], a.arrangement, a.degree)
        for c in chosen
        for a in c.absorbers
        if a.norm not in approximate
    }
    made = {
        name: _made(model, name, audit.probes[name], carried.get(name), takes.get(name))
        for name in {**carried, **takes}
    }
    replace_norms(model, {model.get_submodule(name): norm for name, norm in made.items()})
    for c in chosen:
        for kept in c.kept:
            _give_back(model.get_submodule(kept.reader), kept, carried[c.norm])
        model.get_submodule(c.scope).register_forward_hook(partial(_end, carried[c.norm]), always_call=True)


def _give_back(reader: nn.Module, kept: Kept, carried: Carried) -> None:
    """Divide what a reader is called with by the RMS, or those of its outputs that need it."""
    if kept.channels is None:
        reader.register_forward_pre_hook(partial(_scale_input, carried))
    else:
        reader.register_forward_hook(partial(_scale_output, carried, kept.channels))


def _scale_input(carried: Carried, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (carried.divided(args[0]), *args[1:])


def _scale_output(carried: Carried, channels: torch.Tensor, module: nn.Module, args: Any, output: Any) -> Any:
    return torch.where(channels.to(output.device), carried.divided(output), output)


def _end(carried: Carried, module: nn.Module, args: Any, output: Any) -> None:
    forget(carried)


def _made(model: nn.Module, name: str, probe: NormProbe, drops: Carried | None, takes: Missing | None) -> CarriedNorm:
    norm = model.get_submodule(name)
    check_stand_in(model, name, probe, CarriedNorm(norm, probe))
    return CarriedNorm(norm, probe, drops, takes)
