"""Folds with one fault planted: each a kind of mistake that converters make."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.verify.tiny import WIDTH, folded, gain_of, pairs, scale


def gain_left_in_place(source: nn.Module) -> nn.Module:
    """One norm keeps its gain although its readers have it too."""
    candidate = folded(source)
    candidate.model.layers[1].input_layernorm.weight.data.copy_(source.model.layers[1].input_layernorm.weight)
    return candidate


def value_projection_missed(source: nn.Module) -> nn.Module:
    """Only q and k get the gain of one norm; v was overlooked."""
    candidate = folded(source)
    missed = candidate.model.layers[1].self_attn.v_proj.weight
    missed.data.copy_(source.model.layers[1].self_attn.v_proj.weight)
    return candidate


def other_convention(source: nn.Module) -> nn.Module:
    """Every gain is taken for the other convention's: w for 1 + w, or 1 + w for w."""
    candidate = folded(source)
    wrong = 1.0 if source.config.model_type != "gemma" else -1.0
    for (norm, own), (_, theirs) in zip(pairs(source), pairs(candidate), strict=True):
        for reader, target in zip(own, theirs, strict=True):
            target.data.copy_(reader.data)
            scale(target, gain_of(source, norm) + wrong)
    return candidate


def folded_twice(source: nn.Module) -> nn.Module:
    """The readers of one norm get its gain twice."""
    candidate = folded(source)
    norm, readers = next(iter(pairs(source)))
    for reader in next(iter(pairs(candidate)))[1]:
        scale(reader, gain_of(source, norm))
    assert len(readers) > 1
    return candidate


def tied_head_folded(source: nn.Module) -> nn.Module:
    """The final norm goes into a head that shares its weight with the input embedding."""
    candidate = folded(source)
    scale(candidate.lm_head.weight, gain_of(source, source.model.norm))
    candidate.model.norm.weight.data.copy_(candidate.model.layers[0].input_layernorm.weight)
    assert candidate.lm_head.weight is candidate.model.embed_tokens.weight
    return candidate


def row_negated(source: nn.Module) -> nn.Module:
    """One row of one weight has the wrong sign."""
    candidate = folded(source)
    candidate.model.layers[1].self_attn.o_proj.weight.data[WIDTH // 2] *= -1
    return candidate


def expert_missed(source: nn.Module) -> nn.Module:
    """One expert of one layer is left as it was."""
    candidate = folded(source)
    with torch.no_grad():
        candidate.model.layers[1].mlp.experts.gate_up_proj[2] = source.model.layers[1].mlp.experts.gate_up_proj[2]
    return candidate


def router_missed(source: nn.Module) -> nn.Module:
    """The experts of one layer get the gain, their router does not."""
    candidate = folded(source)
    candidate.model.layers[1].mlp.gate.weight.data.copy_(source.model.layers[1].mlp.gate.weight)
    return candidate


Fault = Callable[[nn.Module], nn.Module]
ANYWHERE: tuple[Fault, ...] = (
    gain_left_in_place,
    value_projection_missed,
    other_convention,
    folded_twice,
    tied_head_folded,
    row_negated,
)
EXPERTS: tuple[Fault, ...] = (expert_missed, router_missed)
