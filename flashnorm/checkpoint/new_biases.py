"""Biases that a model does not have and its config can give it: where a norm's bias may go that has no home yet.

Many architectures have a switch for them (`attention_bias`, `mlp_bias`), off by default. Nothing here knows which:
every switch of the config that is off and speaks of a bias is turned on in turn, and its model must be the old one,
operation for operation, but for what its linears add.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from flashnorm.checkpoint.conversion import stored_name
from flashnorm.checkpoint.plan import NewBias, changed
from flashnorm.checkpoint.source import Source
from flashnorm.errors import ConfigError, Refusal
from flashnorm.sites.audit import report_of, trace_fully
from flashnorm.sites.build import hollow_model
from flashnorm.sites.folding import moves_shift
from flashnorm.sites.tracing import Trace
from flashnorm.sites.tying import tied_groups

_Path = tuple[str, ...]


@dataclass(frozen=True)
class Room:
    """Switches of the config that give norms' biases a home, the biases that they add, by stored name, and the model.

    `model`: hollow, of the config with `config_changes` in it.
    """

    config_changes: dict[_Path, object]
    biases: dict[str, NewBias]
    model: PreTrainedModel


def room_for_biases(
    source: Source, config: Any, model: PreTrainedModel, homes: Mapping[str, str], trust_remote_code: bool
) -> Room:
    """The switches of `config` to turn on, so that as many norms' biases as possible move into the next linears.

    `model`: the hollow model of `config`. `homes`: parameter -> the stored tensor that it is loaded from. Raises
    `Refusal` where no norm's bias would move for it.
    """
    before = trace_fully(model)
    wanted = {
        site.norm: {_bias_of(c.weight) for c in site.consumers if not c.takes_shift}
        for site in report_of(model, before).foldable
        if site.bias and not moves_shift(site)
    }
    if not wanted:
        raise Refusal(f"{source.folder} has no norm whose bias lacks a home; leave --add-bias out")

    def widened(changes: Mapping[_Path, object]) -> tuple[PreTrainedModel, frozenset[str]] | None:
        """The model with these switches on and its new biases; None where they change anything else."""
        try:
            wider = hollow_model(type(config).from_dict(changed(source.config, changes)), trust_remote_code)
        except ConfigError:
            return None
        added = _added_biases(model, wider)
        return (wider, added) if added and _same_without(wider, added, before) else None

    found = {path: at[1] for path in _switches(config, source.config) if (at := widened({path: True})) is not None}
    there = frozenset().union(*found.values())
    moving = frozenset().union(*(biases for biases in wanted.values() if biases <= there))
    useful = dict.fromkeys((path for path, added in found.items() if added & moving), True)
    together = widened(useful) if useful else None
    if together is None:
        homeless = next(((norm, sorted(biases - there)) for norm, biases in wanted.items() if biases - there), None)
        lack = f"none for {_some(homeless[1])}, behind {homeless[0]}" if homeless else "none that go together"
        raise Refusal(
            f"{source.folder}: its config has no switches that give all readers of a norm a bias ({lack}), and loaders "
            "drop what their model has no place for; leave --add-bias out: the biases stay with their norms, divided "
            "by the gains"
        )
    wider, added = together
    aliases = {name: group for group in tied_groups(model) for name in group}
    biases = {}
    for name in sorted(added):
        weight = f"{name.rpartition('.')[0]}.weight"
        home = next(homes[alias] for alias in aliases[weight] if alias in homes)
        biases[stored_name(wider, name)] = NewBias(home, model.get_parameter(weight).shape[0])
    return Room(dict(useful), biases, wider)


def _switches(config: Any, stored: Mapping[str, Any]) -> Iterator[_Path]:
    """Every setting of a bias that is off, in `config.json` or by its class's default.

    A nested config that `config.json` leaves out is left out here too, as in `tying.tie_flags`.
    """

    def visit(part: Mapping[str, Any], there: Mapping[str, Any], path: _Path) -> Iterator[_Path]:
        for key, value in part.items():
            if value is False and "bias" in key:
                yield (*path, key)
            elif isinstance(value, dict) and isinstance(there.get(key), dict):
                yield from visit(value, there[key], (*path, key))

    return visit(config.to_dict(), stored, ())


def _added_biases(model: PreTrainedModel, wider: PreTrainedModel) -> frozenset[str]:
    """The biases that `wider` has more than `model`; none where they differ in anything else than biases of linears."""
    old = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    new = {name: p.shape for name, p in wider.named_parameters(remove_duplicate=False)}
    added = frozenset(new.keys() - old.keys())
    kept = all(new.get(name) == shape for name, shape in old.items())
    plain = all(name.endswith(".bias") and _is_linear(wider.get_submodule(name.rpartition(".")[0])) for name in added)
    return added if kept and plain else frozenset()


def _is_linear(module: nn.Module) -> bool:
    """Its bias is added, and does nothing else."""
    return type(module).forward is nn.Linear.forward


def _same_without(wider: PreTrainedModel, added: Iterable[str], before: Trace) -> bool:
    """Whether `wider` without its new biases runs the very operations of the old model."""
    biases = [(wider.get_submodule(name.rpartition(".")[0]), wider.get_parameter(name)) for name in added]
    try:
        for owner, _ in biases:
            owner.register_parameter("bias", None)
        return trace_fully(wider).operations == before.operations
    finally:
        for owner, bias in biases:
            owner.register_parameter("bias", bias)


def _bias_of(weight: str) -> str:
    return f"{weight.rpartition('.')[0]}.bias"


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
