"""Decides for every site whether its norm may move into its readers, and which of these share a product."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashnorm.runtime.activations import find_activation
from flashnorm.runtime.changes import anything_attached, attached
from flashnorm.runtime.observing import Call, Observation
from flashnorm.sites.audit import AuditReport
from flashnorm.sites.types import Site


@dataclass(frozen=True)
class Gate:
    """An MLP that computes down(act(gate) ⊙ up) and nothing else."""

    mlp: str
    down: str  # the name of its child
    activation: str


@dataclass(frozen=True)
class Product:
    """Linears (module names) that read one and the same tensor, as one matrix; gate before up where there is a gate."""

    readers: tuple[str, ...]
    gate: Gate | None = None


@dataclass(frozen=True)
class Plan:
    """A norm that hands on its input, and the products that take its place."""

    norm: str
    gain: str  # the norm's own name of the parameter
    offset: float
    eps: float
    products: tuple[Product, ...]


class Stock(Exception):
    """The site stays as it is; the message says why."""


def plan_site(model: nn.Module, site: Site, report: AuditReport, seen: Observation) -> Plan:
    """What replaces the site. Raises `Stock` with the reason where it must stay as it is."""
    _require_rms_norm(site)
    names = _readers(model, site, report)
    for name in (site.norm, *names):
        _require_bare(model, name)
    _require_pure(model, site, names, seen)
    norm = model.get_submodule(site.norm)
    assert site.weight is not None
    assert site.convention is not None
    return Plan(
        site.norm,
        site.weight.rpartition(".")[2],
        site.convention.offset,
        _exact_epsilon(norm, site.convention.eps),
        tuple(product for together in _together(model, names, seen) for product in _products(model, together, seen)),
    )


def _require_rms_norm(site: Site) -> None:
    convention = site.convention
    if not site.foldable or convention is None:
        raise Stock(site.reason or "the trace never ran it")
    if convention.subtracts_mean:
        raise Stock("it subtracts the mean: a LayerNorm")
    if convention.has_bias:
        raise Stock("it adds a bias after its gain")
    if convention.gated:
        raise Stock("a gate multiplies its output")
    if convention.group_size != site.width:
        raise Stock(f"it normalises groups of {convention.group_size} of its {site.width} channels")
    if convention.eps_placement != "inside_sqrt":
        raise Stock(f"its epsilon does not stand inside the root ({convention.eps_placement})")
    if site.shared_with:
        raise Stock(f"its gain is shared with {', '.join(site.shared_with)}")


def _readers(model: nn.Module, site: Site, report: AuditReport) -> tuple[str, ...]:
    names = []
    for consumer in site.consumers:
        name, _, own = consumer.weight.rpartition(".")
        reader = model.get_submodule(name)
        if type(reader) is not nn.Linear or own != "weight":
            raise Stock(f"its reader {consumer.weight} belongs to a {type(reader).__name__}, not to a plain linear")
        aliases = report.aliases.get(consumer.weight, ())
        if len(aliases) > 1:
            raise Stock(f"its reader {consumer.weight} is tied to {next(a for a in aliases if a != consumer.weight)}")
        if consumer.channels is not None or reader.in_features != site.width:
            raise Stock(f"its reader {consumer.weight} reads a part of it, or another order of its channels")
        names.append(name)
    return tuple(names)


def _require_bare(model: nn.Module, name: str) -> None:
    """Nothing hangs on the module that a stand-in would leave out, and it stands in one place."""
    module = model.get_submodule(name)
    places = [path for path, other in model.named_modules(remove_duplicate=False) if other is module]
    if len(places) > 1:
        raise Stock(f"{name} is also {next(path for path in places if path != name)}: one module in two places")
    sentence = attached(name, module)
    if sentence:
        raise Stock(sentence)
    if any(parameter.is_meta for parameter in module.parameters()):
        raise Stock(f"the weights of {name} are not in memory (offloaded)")


def _require_pure(model: nn.Module, site: Site, names: tuple[str, ...], seen: Observation) -> None:
    """Every reader, and nobody else, reads exactly what the norm returns."""
    calls = seen.calls.get(site.norm, [])
    if not calls:
        raise Stock("the probe did not run it")
    for call in calls:
        x = call.only_tensor
        if x is None or not isinstance(call.output, Tensor) or call.output.shape != x.shape:
            raise Stock("it is not called with one tensor alone")
        if call.output.dtype != x.dtype or call.output.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            raise Stock("it returns another dtype than it takes, or works in place")
    if site.norm in seen.returned:
        raise Stock(f"its output is also returned by {seen.returned[site.norm]}, to callers who want it normed")
    for name in names:
        if not seen.calls.get(name):
            raise Stock(f"its reader {name} was never called as a module")
        for call in seen.calls[name]:
            if call.only_tensor is None or call.reads != site.norm:
                raise Stock(f"its reader {name} takes something else than exactly the norm's output")
        weight = linear_of(model, name).weight
        if weight.dtype != calls[0].args[0].dtype or not weight.is_contiguous():
            raise Stock(f"the weight of its reader {name} has another dtype than its input, or is not contiguous")


def linear_of(model: nn.Module, name: str) -> nn.Linear:
    """The reader of that name, which was seen to be a linear."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def _exact_epsilon(norm: nn.Module, measured: float) -> float:
    """The epsilon is measured to a few digits; the number that the module itself holds, where it is that one."""
    stored = [value for value in vars(norm).values() if isinstance(value, float)]
    return next((value for value in stored if abs(value - measured) <= 1e-3 * measured), measured)


def _together(model: nn.Module, names: tuple[str, ...], seen: Observation) -> list[tuple[str, ...]]:
    """The readers by the tensors, as objects, that they are called with; those with and without a bias apart."""
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in names:
        linear = linear_of(model, name)
        tensors = tuple(id(call.args[0]) for call in seen.calls[name])
        groups[(tensors, linear.bias is None, linear.weight.device)].append(name)
    return [tuple(group) for group in groups.values()]


def _products(model: nn.Module, names: tuple[str, ...], seen: Observation) -> list[Product]:
    """A gated MLP's gate and up for themselves; all others that read the same tensor as one."""
    by_parent: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_parent[name.rpartition(".")[0]].append(name)
    gated = [product for parent, own in by_parent.items() if (product := _gated(model, parent, tuple(own), seen))]
    taken = {name for product in gated for name in product.readers}
    rest = tuple(name for name in names if name not in taken)
    return [*gated, *([Product(rest)] if rest else [])]


def _gated(model: nn.Module, parent: str, readers: tuple[str, ...], seen: Observation) -> Product | None:
    """The product with a gate, where `parent` is a gated MLP whose first projections are `readers`."""
    mlp = model.get_submodule(parent)
    calls = seen.calls.get(parent, [])
    linears = [linear_of(model, name) for name in readers]
    widths = {linear.out_features for linear in linears}
    if len(linears) > 2 or len(widths) > 1 or sum(linear.out_features for linear in linears) % 2:
        return None
    if not calls or not _only_passes_on(mlp, calls) or any(linear.bias is not None for linear in linears):
        return None
    down = _last_child(mlp, parent, calls, seen)
    if down is None or anything_attached(mlp):  # somebody watches a part that its stand-in would no longer call
        return None
    for order in {readers: None, readers[::-1]: None}:
        projections = tuple(linear_of(model, name) for name in order)
        with torch.no_grad():
            activation = find_activation(mlp, projections, mlp.get_submodule(down), calls[0].args[0])
        if activation is not None:
            return Product(order, Gate(parent, down, activation))
    return None


def _only_passes_on(mlp: nn.Module, calls: list[Call]) -> bool:
    """It is called with the norm's output alone and has no weights of its own."""
    alone = all(call.only_tensor is not None and call.reads is not None for call in calls)
    return alone and not any(True for _ in (*mlp.parameters(recurse=False), *mlp.buffers(recurse=False)))


def _last_child(mlp: nn.Module, parent: str, calls: list[Call], seen: Observation) -> str | None:
    """The child whose output is what the MLP returns, call by call."""
    for child, _ in mlp.named_children():
        own = seen.calls.get(f"{parent}.{child}", [])
        if len(own) == len(calls) and all(a.output is b.output for a, b in zip(own, calls, strict=True)):
            return child
    return None
