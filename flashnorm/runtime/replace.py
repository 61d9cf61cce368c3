"""Puts stand-ins in the place of a site's modules, and the modules back in theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from flashnorm.runtime.merging import Group
from flashnorm.runtime.modules import DeferredLinear, DeferredNorm, GatedMLP
from flashnorm.runtime.places import Place
from flashnorm.runtime.planning import Plan, Product


@dataclass
class Swap:
    """One module that stands in for another as a child of `parent`."""

    parent: nn.Module
    child: str
    original: nn.Module
    stand_in: nn.Module

    def undo(self) -> None:
        """Put the original back, with whatever parameters and children its stand-in has by now."""
        self.original._parameters.update(self.stand_in._parameters)
        self.original._modules.update(self.stand_in._modules)
        self.original.training = self.stand_in.training
        self.parent._modules[self.child] = self.original


@dataclass
class Replaced:
    """Everything that was done to one site."""

    plan: Plan
    groups: list[Group]
    swaps: list[Swap]
    names: list[str]  # of the modules that were replaced

    def undo(self) -> None:
        """Restore the original modules, each parameter in memory of its own."""
        for group in self.groups:
            group.scatter()
        for swap in reversed(self.swaps):
            swap.undo()


def replace(model: nn.Module, plan: Plan) -> Replaced:
    """Replace the site's norm and its readers, in place."""
    done = Replaced(plan, [], [], [])
    norm = DeferredNorm(model.get_submodule(plan.norm))
    _swap(model, plan.norm, norm, done)
    for product in plan.products:
        done.groups.append(_replace_product(model, plan, product, norm, done))
    norm.groups = tuple(done.groups)
    release_cached_memory(model)
    return done


def _replace_product(model: nn.Module, plan: Plan, product: Product, norm: DeferredNorm, done: Replaced) -> Group:
    linears = []
    for name in product.readers:
        original = model.get_submodule(name)
        assert isinstance(original, nn.Linear)
        linears.append(DeferredLinear(original))
        _swap(model, name, linears[-1], done)
    group = Group(norm, plan.gain, plan.offset, plan.eps, linears)
    for part, linear in enumerate(linears):
        linear.join(group, part)
    group.gather()
    gate = product.gate
    if gate is not None:
        _swap(model, gate.mlp, GatedMLP(model.get_submodule(gate.mlp), group, gate.down, gate.activation), done)
    group.places = _places(model, plan, product)
    return group


def _places(model: nn.Module, plan: Plan, product: Product) -> tuple[Place, ...]:
    """The norm gives no normed x and the readers take none; of a gated MLP nothing runs but its down projection."""

    def place(name: str, *, takes_stock: bool, gives_stock: bool) -> Place:
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        return Place(name, parent, child, parent.get_submodule(child), takes_stock, gives_stock)

    norm, gate = place(plan.norm, takes_stock=True, gives_stock=False), product.gate
    if gate is None:
        return norm, *(place(reader, takes_stock=False, gives_stock=True) for reader in product.readers)
    children = [f"{gate.mlp}.{name}" for name, _ in model.get_submodule(gate.mlp).named_children() if name != gate.down]
    skipped = (place(child, takes_stock=False, gives_stock=False) for child in children)
    return norm, place(gate.mlp, takes_stock=False, gives_stock=True), *skipped


def _swap(model: nn.Module, name: str, stand_in: nn.Module, done: Replaced) -> None:
    path, _, child = name.rpartition(".")
    parent = model.get_submodule(path)
    original = parent._modules[child]
    assert original is not None
    parent._modules[child] = stand_in
    done.swaps.append(Swap(parent, child, original, stand_in))
    done.names.append(name)


def release_cached_memory(model: nn.Module) -> None:
    """Hand back what unmerged weights and float64 checks lay in: tensors of other sizes do not fit, so it adds up."""
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.empty_cache()
