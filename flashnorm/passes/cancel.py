"""Drop norms that a later norm makes redundant, on a live module; exact in epsilon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from flashnorm.errors import Refusal
from flashnorm.passes.carried_norm import Carried, CarriedNorm, forget
from flashnorm.sites.cancelling import Cancellation, CancellationAudit, Kept, audit_cancellation
from flashnorm.sites.probing import NormProbe


@dataclass(frozen=True)
class CancelReport:
    """What a cancellation did. `full`: norms that divide no more; `partial`: those of which a part of the readers still
    takes the scalar, with these readers; `skipped`: all others, with the reason."""

    full: list[str]
    partial: dict[str, tuple[str, ...]]
    skipped: dict[str, str]

    def __str__(self) -> str:
        return f"{len(self.full)} norms dropped, {len(self.partial)} for a part, {len(self.skipped)} left alone"


def cancel(model: nn.Module, *, inputs: dict[str, Any] | None = None) -> CancelReport:
    """Drop every norm that a later norm makes redundant, in place, wholly or for a part of its readers.

    A dropped norm multiplies by its gain and divides by nothing. The norms behind its readers take the missing scalar
    out, with the epsilon of `algebra.carried_epsilon`; readers that no norm follows get it back. The model computes the
    same function afterwards, up to rounding; parameters and their names stay. `inputs`: as for `flashnorm.audit`.
    Raises `Refusal`, with nothing changed, where a norm has forward hooks or computes something else in the model's
    dtype than what was found out about it, and what `audit` raises.
    """
    audit = audit_cancellation(model, inputs=inputs)
    chosen = [c for c in audit.cancellations if c.verdict != "no"]
    apply_cancel(model, chosen, audit)
    return CancelReport(
        full=[c.norm for c in chosen if c.verdict == "full"],
        partial={c.norm: tuple(k.reader for k in c.kept) for c in chosen if c.verdict == "partial"},
        skipped={c.norm: c.reason for c in audit.cancellations if c.verdict == "no"},
    )


def apply_cancel(model: nn.Module, chosen: Iterable[Cancellation], audit: CancellationAudit) -> None:
    """Drop the given norms, whatever their verdict: `cancel` chooses them, tests force them.

    Everything is built and checked before the model is changed.
    """
    chosen = tuple(chosen)
    carried = {c.norm: Carried(c.norm) for c in chosen}
    takes = {a.norm: (carried[c.norm], a.arrangement) for c in chosen for a in c.absorbers}
    made = {
        name: _checked(
            model,
            name,
            audit.probes[name],
            CarriedNorm(model.get_submodule(name), audit.probes[name], drops=carried.get(name), takes=takes.get(name)),
        )
        for name in {**carried, **takes}
    }
    _replace(model, {model.get_submodule(name): norm for name, norm in made.items()})
    for c in chosen:
        for kept in c.kept:
            _give_back(model.get_submodule(kept.reader), kept, carried[c.norm])
        model.get_submodule(c.scope).register_forward_hook(partial(_end, carried[c.norm]), always_call=True)


def _replace(model: nn.Module, made: Mapping[nn.Module, CarriedNorm]) -> None:
    """Put every norm's stand-in wherever the model holds the norm, under each of its names."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in made:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made[module])


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


@torch.no_grad()
def _checked(model: nn.Module, name: str, probe: NormProbe, made: CarriedNorm) -> CarriedNorm:
    """`made`, if it computes what the norm does where nothing is dropped: at ordinary and at tiny inputs.

    An epsilon that depends on the dtype, say, is not the one that the experiment in another dtype has found.
    """
    norm = model.get_submodule(name)
    if norm._forward_hooks or norm._forward_pre_hooks:
        raise Refusal(f"{name} has a forward hook, which would be lost with it; remove the hook first")
    own = next(norm.parameters(), None)
    some = own if own is not None else next(p for p in model.parameters() if p.is_floating_point())
    device = "cpu" if some.is_meta else some.device
    shape = own.shape if own is not None else (probe.convention.group_size,)
    unit = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([unit, unit * max(probe.convention.eps, 1e-12) ** 0.5]).to(device, some.dtype)
    ours, theirs = CarriedNorm(norm, probe)(rows), norm(rows)
    # Both round the result to the dtype, and round in float32 at best inside: a few units of the coarser of the two.
    unit_roundoff = max(torch.finfo(some.dtype).eps, torch.finfo(torch.float32).eps)
    if not bool((ours - theirs).abs().max() <= 8 * unit_roundoff * theirs.abs().max()):
        raise Refusal(f"{name} computes something else in {some.dtype} than the norm that it was found to be")
    return made
