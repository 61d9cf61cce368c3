"""Tied weights: a head that shares its weight with the input embedding, and what it takes to part them."""

from __future__ import annotations

import copy
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
    for names in tied_groups(model):
        embeddings = [n for n in names if isinstance(_owner(model, n), nn.Embedding)]
        heads = [n for n in names if n not in embeddings]
        if not embeddings or not heads:
            continue
        for head in heads:
            owner, own_name = _owner(model, head), head.rpartition(".")[2]
            shared = owner.get_parameter(own_name)
            setattr(owner, own_name, nn.Parameter(torch.empty_like(shared), requires_grad=False))
            untied[head] = embeddings[0]
    return untied


def tie_flags(config: Any) -> dict[tuple[str, ...], object]:
    """Every place in `config.json` that says the head is tied, with the value that says it is not.

    The flag sits at the top level, in nested configs, or nowhere (a class default); the loader reads all of them.
    """
    table = config.to_dict()
    changes: dict[tuple[str, ...], object] = {("tie_word_embeddings",): False}

    def visit(part: Any, path: tuple[str, ...]) -> None:
        for key, value in part.items():
            if key == "tie_word_embeddings" and value:
                changes[(*path, key)] = False
            elif isinstance(value, dict):
                visit(value, (*path, key))

    visit(table, ())
    return changes


def without_ties(config: Any) -> Any:
    """The config as it reads back from `config.json` once every tie flag there is off.

    Some config classes derive other settings from the flag, or ignore it, so setting the attribute is not the same.
    """
    table = copy.deepcopy(config.to_dict())
    for path, value in tie_flags(config).items():
        part = table
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
    return type(config).from_dict(table)


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])
