"""Parity: where two models part, and why: the place and the mistake of every planted fault are named."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import flashnorm
from flashnorm.verify.causes import likely_cause, norm_of
from flashnorm.verify.parting import Parting, find_parting, place_of
from tests.faults.norms import epsilon_dropped, epsilon_scaled, scale_twice, small_embedding
from tests.verify import faults
from tests.verify.cases import tokens
from tests.verify.tiny import folded, save, tiny_model

Fault = Callable[[nn.Module], nn.Module]


def _part(source: nn.Module, candidate: nn.Module) -> tuple[Parting, str]:
    sites = flashnorm.audit(source).sites
    both = (lambda: copy.deepcopy(source), lambda: copy.deepcopy(candidate))
    parting = find_parting(*both, tokens(32), norm_of(sites))
    return parting, likely_cause(parting, source, candidate, sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma", "qwen2", "mixtral"])
def test_a_correct_fold_parts_nowhere(family: str, dtype: torch.dtype) -> None:
    source = tiny_model(family, dtype)
    parting, cause = _part(source, folded(source))
    assert (parting.place, cause) == ("", "")
    assert len(parting.modules) > 30
    assert max(module.excess for module in parting.modules) < 0.3


PLACES = [
    ("llama", faults.gain_left_in_place, "layer 1, self_attn.q_proj", "still has it"),
    ("gemma", faults.gain_left_in_place, "layer 1, self_attn.q_proj", "still has it"),
    (
        "llama",
        faults.value_projection_missed,
        "layer 1, self_attn.v_proj",
        "not folded into model.layers.1.self_attn.v",
    ),
    ("llama", faults.other_convention, "layer 0, self_attn.q_proj", "w was folded as 1 + w"),
    ("gemma", faults.other_convention, "layer 0, self_attn.q_proj", "1 + w was folded as w"),
    ("qwen2", faults.folded_twice, "layer 0, self_attn.q_proj", "it was folded twice"),
    (
        "llama",
        faults.tied_head_folded,
        "model.embed_tokens",
        "model.norm was folded into a head that shares",
    ),
    ("gemma", faults.row_negated, "layer 1, self_attn.o_proj", ""),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "fault", "place", "cause"), PLACES)
def test_a_wrong_fold_is_placed_and_named(
    family: str, fault: Fault, place: str, cause: str, dtype: torch.dtype
) -> None:
    source = tiny_model(family, dtype)
    parting, found = _part(source, fault(source))
    assert parting.place == place
    assert cause in found
    assert bool(found) == bool(cause)


def test_a_missed_expert_and_a_missed_router_are_named() -> None:
    source = tiny_model("mixtral")
    parting, cause = _part(source, faults.expert_missed(source))
    assert parting.place == "layer 1, mlp.experts"
    assert cause == "expert 2 of model.layers.1.mlp.experts.gate_up_proj was left out of the fold"
    parting, cause = _part(source, faults.router_missed(source))
    assert parting.place == "layer 1, mlp.gate"
    assert "was taken from the norm and not folded into model.layers.1.mlp.gate.weight" in cause


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("fault", "place", "words"),
    [
        (epsilon_dropped, "layer 0, input_layernorm", "epsilon of model.layers.0.input_layernorm was dropped"),
        (scale_twice, "layer 1, input_layernorm", "the scale of model.layers.1.input_layernorm is applied twice"),
    ],
)
def test_a_wrong_scalar_is_named(fault: Fault, place: str, words: str, dtype: torch.dtype) -> None:
    source = small_embedding(tiny_model("llama", dtype)) if fault is epsilon_dropped else tiny_model("llama", dtype)
    parting, cause = _part(source, fault(source))
    assert (parting.place, cause) == (place, words)


def test_a_scaled_epsilon_is_measured() -> None:
    source = small_embedding(tiny_model("llama"))
    parting, cause = _part(source, epsilon_scaled(source))
    assert parting.place == "layer 0, input_layernorm"
    assert cause == "epsilon of model.layers.0.input_layernorm is 3 times what it should be"


def test_the_battery_compares_with_a_reference_and_draws_the_drift_by_layer(tmp_path) -> None:
    source = tiny_model("llama", torch.bfloat16)
    folder = save(source, tmp_path / "source")
    for candidate, passes in ((folded(source), True), (faults.value_projection_missed(source), False)):
        target = save(candidate, tmp_path / f"candidate-{passes}")
        report = flashnorm.battery(target, reference=folder, level="quick", only=["parity"])
        assert report.passed is passes
        outcome = report["parity"]
        assert len(outcome.series["layer"]) == len(outcome.series["layer_error"]) > 30
        assert len(outcome.series["divergence"]) == len(outcome.series["position"]) == 96
    assert "part first at layer 1, self_attn.v_proj" in report.verdict
    assert "likely cause: the gain of model.layers.1.input_layernorm was taken from the norm" in report.verdict


def test_verify_says_where_two_checkpoints_part() -> None:
    source = tiny_model("llama")
    report = flashnorm.verify(source, faults.folded_twice(source), new_tokens=0, positions=64)
    assert "the models part first at layer 0, self_attn.q_proj" in report.notes[-1]
    assert "it was folded twice" in report.notes[-1]
    assert not any("part first" in note for note in flashnorm.verify(source, folded(source), new_tokens=0).notes)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.self_attn.q_proj", "layer 3, self_attn.q_proj"),
        ("transformer.h.11", "layer 11"),
        ("lm_head", "lm_head"),
    ],
)
def test_places(name: str, place: str) -> None:
    assert place_of(name) == place
