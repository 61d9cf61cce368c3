"""Which norms a later norm makes redundant, and for how much of what they feed: the verdicts of cancellation.

Proposition 3 of FlashNorm (Graef et al., arXiv:2407.09577): norm, linear without bias, norm is linear, norm. Here it is
exact, since the second norm is given the epsilon of `algebra.carried_epsilon`, and it need not hold for all readers:
a reader's output channels that no norm follows keep the scalar. Between the linear and the second norm there may be
more linears, and what is homogeneous, such as an MLP whose activation is a ReLU or its square.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from flashnorm.sites.arrangement import Arrangement
from flashnorm.sites.audit import hollow_of, trace_fully
from flashnorm.sites.probing import NormProbe
from flashnorm.sites.scalar_record import Absorbed, Members, Reading, ScalarTrace
from flashnorm.sites.scalars import trace_scalars

Verdict = Literal["full", "partial", "no"]


@dataclass(frozen=True)
class Absorber:
    """A later norm that takes the scalar out, and where the tokens lie in what it is called with.

    `degree`: the power of the scalar that multiplies that: 3 behind relu²(gate) ⊙ up.
    """

    norm: str
    arrangement: Arrangement
    degree: int = 1


@dataclass(frozen=True)
class Kept:
    """A reader that still needs the scalar. `channels`: those of its outputs that do, None where all of them do."""

    reader: str
    channels: torch.Tensor | None = field(compare=False, repr=False)
    reason: str


@dataclass(frozen=True)
class Cancellation:
    """What may be dropped of one norm: its division by the RMS, for those of its readers that a norm follows."""

    norm: str
    verdict: Verdict
    reason: str  # why not, or why not wholly; empty for "full"
    scope: str = ""  # the innermost module around the norm, its readers and its absorbers that the model calls
    free: tuple[str, ...] = ()  # readers all of whose outputs later norms take the scalar out of
    kept: tuple[Kept, ...] = ()
    absorbers: tuple[Absorber, ...] = ()


@dataclass(frozen=True)
class CancellationAudit:
    """The verdicts of one model, in the order of its modules, and how its norms work."""

    cancellations: tuple[Cancellation, ...]
    probes: Mapping[str, NormProbe] = field(repr=False)
    irregular: Mapping[str, str] = field(repr=False)  # norms that are more than one scalar, a gain and a bias, and how

    def __str__(self) -> str:
        counts = Counter(c.verdict for c in self.cancellations)
        return (
            f"{counts['full']} of {len(self.cancellations)} norms can be dropped, {counts['partial']} more for a part "
            "of their readers"
        )


def audit_cancellation(
    model: nn.Module | str | os.PathLike[str], *, inputs: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> CancellationAudit:
    """Which norms of a live model, or of a checkpoint folder by its config alone, a later norm makes redundant.

    Arguments and errors are those of `flashnorm.audit`.
    """
    hollow = hollow_of(model, trust_remote_code)
    live = model if isinstance(model, nn.Module) else None
    trace = trace_scalars(hollow, trace_fully(hollow, inputs, live).runs, live)
    return CancellationAudit(tuple(cancellations(trace)), trace.probes, trace.irregular)


def cancellations(trace: ScalarTrace) -> list[Cancellation]:
    """One verdict for each norm that ran, in the order of the model's modules."""
    state = _State(trace)
    state.settle()
    return [_verdict(state, name) for name, _ in trace.model.named_modules() if name in trace.probes]


def before_any_linear(trace: ScalarTrace) -> dict[str, str]:
    """Norm -> why its scalar cannot be taken behind the products that read it; only those that cannot are named."""
    state = _State(trace)
    unread = {norm: "no linear layer reads its output" for norm in trace.probes if not state.readings(norm)}
    return {**unread, **state.refused}


_BIAS = "it adds a bias, which its scalar does not multiply"


class _State:
    """Which channels keep their scalar, and which norms can take one out: each decides the other."""

    def __init__(self, trace: ScalarTrace) -> None:
        self.trace = trace
        self.kept: Members = {}
        self.reasons: dict[Reading, list[str]] = defaultdict(list)
        self.refused = {
            **dict.fromkeys(trace.biased, _BIAS),
            **trace.irregular,
        }  # norm -> why nothing of it can be dropped
        self.calls: dict[str, list[Absorbed]] = defaultdict(list)
        for event in trace.absorbed:
            self.calls[event.by].append(event)
        for stopped in trace.stopped:
            self._keep(stopped.members, stopped.reason)
        self._keep_unseen()

    def settle(self) -> None:
        """Until nothing changes: a norm takes scalars out only if all that it is called with carries the same one."""
        changed = True
        while changed:
            changed = False
            for norm, events in list(self.calls.items()):
                problem = self._problem(norm, events)
                if problem is not None:
                    del self.calls[norm]
                    changed = True
                    for event in events:
                        self._keep(event.members, problem)
            for norm in {norm for norm, _ in self.trace.widths} - set(self.refused):
                problem = self._unscalable(norm)
                if problem is not None:
                    self.refused[norm] = problem
                    changed = True

    def readings(self, norm: str) -> list[Reading]:
        return [reading for reading in self.trace.widths if reading[0] == norm]

    def absorbers(self, norm: str) -> list[Absorbed]:
        """One call of every norm that takes the scalar of `norm` out."""
        return [events[0] for events in self.calls.values() if any(name == norm for name, _ in events[0].members)]

    def _keep_unseen(self) -> None:
        """Channels that came to nothing in the runs, as those of a window that was not full, may do so in another."""
        seen: Members = {reading: mask.clone() for reading, mask in self.kept.items()}
        for event in self.trace.absorbed:
            for reading, mask in event.members.items():
                seen[reading] = seen[reading] | mask if reading in seen else mask
        for reading, width in self.trace.widths.items():
            unseen = ~seen.get(reading, torch.zeros(width, dtype=torch.bool))
            if unseen.any():
                self._keep({reading: unseen}, "the run did not use all of it")

    def _keep(self, members: Members, reason: str) -> None:
        for reading, mask in members.items():
            self.kept[reading] = self.kept[reading] | mask if reading in self.kept else mask.clone()
            if reason not in self.reasons[reading]:
                self.reasons[reading].append(reason)
            if not reading[1]:
                self.refused.setdefault(reading[0], f"before any linear layer, {reason}")

    def _problem(self, norm: str, events: list[Absorbed]) -> str | None:
        if norm in self.trace.plain or any(event != events[0] for event in events):
            return f"{norm}, which it reaches, is also called with other things"
        if norm in self.trace.irregular:
            return f"{norm}, which it reaches, is not a norm alone: {self.trace.irregular[norm]}"
        if any(name in self.refused for event in events for name, _ in event.members):
            return "the norm cannot be dropped"
        if any((self.kept[r] & mask).any() for e in events for r, mask in e.members.items() if r in self.kept):
            return f"{norm}, which it reaches, is also given channels that keep their scalar"
        return None

    def _unscalable(self, norm: str) -> str | None:
        """Why a reader that has to keep the scalar cannot be given it."""
        if not self.absorbers(norm):
            return None  # nothing of it is dropped anyway, for better reasons
        for reading in self.readings(norm):
            mask, reader = self.kept.get(reading), reading[1]
            if mask is None or not mask.any():
                continue
            if self.trace.fed[reader] != {norm}:
                return f"its reader {reader}, which keeps the scalar, is also called with something else"
            if not mask.all() and reader not in self.trace.whole:
                return f"part of what its reader {reader} gives keeps the scalar, and cannot be told from its output"
        return None


def _verdict(state: _State, norm: str) -> Cancellation:
    refused = state.refused.get(norm)
    if refused is not None:
        return Cancellation(norm, "no", refused)
    readings = state.readings(norm)
    if not readings:
        return Cancellation(norm, "no", "no linear layer reads its output")
    kept, free = [], []
    for reading in readings:
        mask = state.kept.get(reading)
        if mask is None or not mask.any():
            free.append(reading[1])
            continue
        channels = None if mask.all() else mask
        kept.append(Kept(reading[1], channels, "; ".join(state.reasons[reading])))
    reason = "; ".join(f"{k.reader}{'' if k.channels is None else ' in part'}: {k.reason}" for k in kept)
    absorbers = state.absorbers(norm)
    if not absorbers:
        return Cancellation(norm, "no", reason or "no norm follows its readers")
    verdict: Verdict = "partial" if kept else "full"
    scope = _scope(state.trace, [norm, *(r for _, r in readings), *(a.by for a in absorbers)])
    found = tuple(Absorber(a.by, a.arrangement, a.degree) for a in absorbers)
    return Cancellation(norm, verdict, reason, scope, tuple(free), tuple(kept), found)


def _scope(trace: ScalarTrace, names: list[str]) -> str:
    """The innermost module around all of these that the model calls."""
    parts = [name.split(".")[:-1] for name in names]
    common = 0
    while all(len(p) > common and p[common] == parts[0][common] for p in parts):
        common += 1
    while common and ".".join(parts[0][:common]) not in trace.called:
        common -= 1
    return ".".join(parts[0][:common])
