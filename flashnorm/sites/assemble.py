"""Turns what a trace recorded into sites: readers that can take a gain, and blockers that forbid it."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from flashnorm.algebra import least_channels
from flashnorm.sites.ownership import Ownership
from flashnorm.sites.probe_cache import ProbeCache
from flashnorm.sites.probing import is_candidate
from flashnorm.sites.tracing import Trace
from flashnorm.sites.types import Blocker, Consumer, Site
from flashnorm.sites.weights import Usage


def assemble(trace: Trace) -> list[Site]:
    """All norms of the traced model in the order of its modules, with readers and blockers."""
    readers = _readers_by_norm(trace)
    owners = Ownership(trace)
    unseen = unseen_weights(trace)
    sites = []
    for name, module in trace.model.named_modules():
        if name not in trace.probes:
            sites += _unreached(name, module, trace.cache) if name not in trace.called else []
        elif trace.gain_of[name] == name:
            sites.append(_site(trace, owners, name, readers[name], unseen))
    return sites


def _unreached(name: str, module: nn.Module, cache: ProbeCache) -> list[Site]:
    """A norm that the model did not run: listed, never folded, since nobody saw who reads it."""
    own = dict(module.named_parameters(recurse=False))
    if not own or not is_candidate(module):
        return []
    gain = next(iter(own.values()))
    found = cache.probe(module, (torch.zeros(1, 2, *gain.shape),), {})
    if found is None or found.weight is None:
        return []
    blocker = Blocker("unreached", "", name, "the trace never ran it, so its readers are not known")
    bias = f"{name}.{found.bias}" if found.bias else None
    return [Site(name, f"{name}.{found.weight}", bias, gain.numel(), found.convention, (), (blocker,))]


def _site(trace: Trace, owners: Ownership, norm: str, readers: dict[str, Usage], unseen: dict[str, torch.Size]) -> Site:
    found = trace.probes[norm]
    sharers = tuple(other for other, owner in trace.gain_of.items() if owner == norm and other != norm)
    blockers = list(trace.blockers.get(norm, []))
    consumers = []
    for weight, usage in readers.items():
        problem = _problem(trace, owners, weight, usage)
        if problem is not None:
            blockers.append(problem)
        else:
            consumers.append(_consumer(trace, owners, norm, weight, usage))
    own = trace.model.get_submodule(norm)
    gain = own.get_parameter(found.weight) if found.weight else None
    prefix = f"{norm}." if norm else ""
    if found.weight:
        blockers += owners.problems(norm, sharers)
    if not consumers and not blockers and found.weight:
        blockers.append(Blocker("unread", "", norm, "nothing that the model computes reads its output"))
    if consumers and gain is not None and not blockers:
        blockers += _possible_reader(trace, norm, gain.numel(), consumers, unseen)
    return Site(
        norm=norm,
        weight=prefix + found.weight if found.weight else None,
        bias=prefix + found.bias if found.bias else None,
        width=gain.numel() if gain is not None else 0,
        convention=found.convention,
        consumers=tuple(consumers),
        blockers=tuple(dict.fromkeys(blockers)),
        shared_with=sharers,
    )


def _readers_by_norm(trace: Trace) -> dict[str, dict[str, Usage]]:
    """For every norm, the weights that meet one of its channels."""
    readers: dict[str, dict[str, Usage]] = defaultdict(dict)
    for name, usage in trace.ledger.usage.items():
        for codes in (*usage.codes.values(), *usage.clashing):
            for norm in trace.numbering.norms_in(codes):
                readers[norm][name] = usage
    return readers


def _problem(trace: Trace, owners: Ownership, weight: str, usage: Usage) -> Blocker | None:
    """Why scaling this weight would change something else as well."""
    reading = usage.reads[0].where if usage.reads else ""
    aliases = trace.ledger.aliases[weight]
    if usage.others:
        op, where = usage.others[0]
        if len(aliases) > 1 and op == "embedding":
            detail = f"its reader {aliases[-1]} is tied to {aliases[0]}, the input embedding"
            return Blocker("tied", op, where, detail, remedy="--untie")
        return Blocker("shared", op, where, f"its reader {weight} is also used by {op} [{where}]")
    if usage.conflict is not None:
        return Blocker("shared", "", reading, f"its reader {weight} cannot be scaled: {usage.conflict}")
    if len(usage.codes) > 1:
        return Blocker("shared", "", reading, f"its reader {weight} is read along two different axes")
    if usage.added:
        return Blocker("shared", "", reading, f"its reader {weight} is also added to a product")
    if owners.is_norms_own(weight):
        return Blocker("shared", "", reading, f"its reader {weight} is also the gain or bias of a norm")
    dtype = trace.model.get_parameter(weight).dtype
    if dtype != torch.float32:  # what any full floating-point dtype is in a hollow model
        return Blocker("codes", "", reading, f"its reader {weight} holds codes of {dtype}, not numbers; dequantise it")
    return owners.unseen_use(weight, "its reader")


def _consumer(trace: Trace, owners: Ownership, norm: str, weight: str, usage: Usage) -> Consumer:
    ((axis, codes),) = usage.codes.items()
    channels = trace.numbering.channels_of(norm, codes)
    read = usage.reads[0]
    biases = {r.bias for r in usage.reads}
    bias = read.bias if len(biases) == 1 else None
    movable = (
        bias is not None
        and all(r.pure for r in usage.reads)
        and bool(((codes > 0) & (channels >= 0)).all())
        and len(usage.shape) == 2
        and owners.only_added_to(bias, weight)
    )
    least = least_channels(channels, trace.numbering.width(norm))
    return Consumer(weight, axis, read.op, read.where, bias, movable, least)


def unseen_weights(trace: Trace) -> dict[str, torch.Size]:
    """Matrices that no run touched."""
    inside_norms = tuple(f"{norm}." for norm in trace.probes)
    return {
        name: usage.shape
        for name, usage in trace.ledger.usage.items()
        if not usage.used and len(usage.shape) > 1 and not name.startswith(inside_norms)
    }


def _possible_reader(
    trace: Trace, norm: str, width: int, consumers: list[Consumer], unseen: dict[str, torch.Size]
) -> list[Blocker]:
    """A matrix that no run touched might read the norm as well: refuse where it fits and lies within the norm's reach.

    The reach of a norm in a repeated block is that block, and those of its readers. Around a norm that stands outside
    of them, it is the linear layers that hang directly on a module around it: another head, say.
    """
    blocks = tuple(filter(None, (block_of(trace.model, name) for name in (norm, *(c.weight for c in consumers)))))
    around = {"", *(norm.rsplit(".", depth)[0] for depth in range(1, norm.count(".") + 1))}
    for name, shape in unseen.items():
        owner = name.rpartition(".")[0]
        linear = isinstance(trace.model.get_submodule(owner), nn.Linear)
        near = name.startswith(blocks) if block_of(trace.model, norm) else linear and owner.rpartition(".")[0] in around
        if near and width in (shape[1:] if linear else shape):
            return [Blocker("unseen", "", name, f"{name} was not reached by the trace and may be a reader too")]
    return []


def block_of(model: nn.Module, name: str) -> str:
    """The innermost element of a module list around `name`, with its dot; empty when there is none."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: depth - 1])), nn.ModuleList):
            return ".".join(parts[:depth]) + "."
    return ""
