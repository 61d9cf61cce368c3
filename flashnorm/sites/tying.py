"""Tied weights: a head that shares its weight with the input embedding, and what it takes to part them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from flashnorm.sites.weights import Place, place


def tied_groups(model: nn.Module) -> list[list[str]]:
    """The names of the model's parameters, those of one weight together."""
    groups: dict[Place, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(place(parameter), []).append(name)
    return list(groups.values())


def untie_head(model: nn.Module) -> dict[str, str]:
    """Give every head that shares an embedding's weight a parameter of its own, in place.

    Returns head parameter name -> embedding parameter name; empty when nothing was tied.
    """
    untied = {}
    for embeddings, heads in _tied_heads(model):
        for head in heads:
            owner, own_name = _owner(model, head), head.rpartition(".")[2]
            shared = owner.get_parameter(own_name)
            setattr(owner, own_name, nn.Parameter(torch.empty_like(shared), requires_grad=False))
            untied[head] = embeddings[0]
    return untied


def has_tied_head(model: nn.Module) -> bool:
    """Whether any head shares its weight with an embedding."""
    return any(True for _ in _tied_heads(model))


def _tied_heads(model: nn.Module) -> Iterator[tuple[list[str], list[str]]]:
    """Of every weight that embeddings and heads share: the names of the embeddings, and those of the heads."""
    for names in tied_groups(model):
        embeddings = [name for name in names if isinstance(_owner(model, name), nn.Embedding)]
        heads = [name for name in names if name not in embeddings]
        if embeddings and heads:
            yield embeddings, heads


def tie_flags(config: Any, stored: Mapping[str, Any]) -> dict[tuple[str, ...], object]:
    """Every place in `config.json` that says the head is tied, with the value that says it is not.

    The flag sits at the top level, in nested configs, or nowhere (a class default); the loader reads all of them.
    `config`: the config object, defaults included. `stored`: what `config.json` holds. A nested config that it leaves
    out is left out here too: with the flag alone in it, it would lose the values that its class derives otherwise.
    """
    changes: dict[tuple[str, ...], object] = {("tie_word_embeddings",): False}

    def visit(part: Any, there: Any, path: tuple[str, ...]) -> None:
        for key, value in part.items():
            if key == "tie_word_embeddings" and value:
                changes[(*path, key)] = False
            elif isinstance(value, dict) and isinstance(there.get(key), dict):
                visit(value, there[key], (*path, key))

    visit(config.to_dict(), stored, ())
    return changes


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])
