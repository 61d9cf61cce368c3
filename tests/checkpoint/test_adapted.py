"""Which weight an adapter's entry changes: orientation, spelling, experts, and everything that cannot be told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashnorm.checkpoint.adapted import copy_target, factors_target, find_weight
from flashnorm.checkpoint.folded_base import FoldedBase, Gain, Weight
from flashnorm.errors import CheckpointError

NORM = "model.layers.0.norm"


def _gain(axis: int, width: int, norm: str = NORM, channels: torch.Tensor | None = None) -> Gain:
    return Gain(norm, axis, torch.ones(width), channels, None)


def _base(*weights: Weight, stored: tuple[Weight, ...] = ()) -> FoldedBase:
    return FoldedBase(
        folder=Path("folded"),
        parameters={weight.name: weight for weight in weights},
        stored={weight.name: weight for weight in stored},
        norms=frozenset({NORM, "model.layers.0.post_norm"}),
        prefix="model",
        untied=False,
        fingerprint="",
    )


def _factors(inputs: int, outputs: int, rank: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rank, inputs), torch.zeros(outputs, rank)


# The square shape cannot tell the sides; the module's kind does.
@pytest.mark.parametrize("shape", [(6, 4), (6, 6)])
@pytest.mark.parametrize(("transposed", "axis", "side"), [(False, 1, 1), (False, 0, 0), (True, 0, 1), (True, 1, 0)])
def test_sides_of_a_matrix(shape: tuple[int, int], transposed: bool, axis: int, side: int) -> None:
    weight = Weight("model.q.weight", shape, transposed, (_gain(axis, shape[axis]),))
    outputs, inputs = shape[::-1] if transposed else shape
    target = factors_target(_base(weight), "model.q", *_factors(inputs, outputs))
    assert target.weight is weight
    assert [found for _, found in target.gains] == [side]
    assert target.module


@pytest.mark.parametrize("asked", ["model.q", "q", "q.base_layer"])
@pytest.mark.parametrize("name", ["model.q.weight", "q.weight"])
def test_spellings(asked: str, name: str) -> None:
    weight = Weight(name, (6, 4), False, ())
    assert factors_target(_base(weight), asked, *_factors(4, 6)).weight is weight


def test_a_name_in_the_files_is_the_last_resort() -> None:
    stored = Weight("experts.0.w1.weight", (6, 4), False, (_gain(1, 4),))
    assert factors_target(_base(stored=(stored,)), "experts.0.w1", *_factors(4, 6)).weight is stored
    parameter = Weight("model.experts.0.w1.weight", (6, 4), True, ())
    assert find_weight(_base(parameter, stored=(stored,)), "experts.0.w1.weight") is parameter


@pytest.mark.parametrize(("shape", "axis"), [((3, 8, 4), 2), ((3, 4, 8), 1)])
@pytest.mark.parametrize("a_reads_the_norm", [True, False])
def test_sides_of_stacked_experts(shape: tuple[int, ...], axis: int, a_reads_the_norm: bool) -> None:
    """PEFT takes either axis of a 3-D parameter for the input, so the gain's length says which factor it belongs to."""
    weight = Weight("model.experts.gate_up_proj", shape, False, (_gain(axis, 4),))
    other = Weight("model.experts.down_proj", (3, 4, 5), False, ())
    sides = (4, 8) if a_reads_the_norm else (8, 4)
    target = factors_target(_base(weight, other), "model.experts.base_layer", *_factors(*sides, rank=6))
    assert target.weight is weight
    assert [side for _, side in target.gains] == [int(a_reads_the_norm)]
    assert not target.module


def test_a_flat_parameter_that_is_not_a_weight() -> None:
    weight = Weight("model.router.scores", (6, 4), False, (_gain(1, 4),))
    assert factors_target(_base(weight), "model.router", *_factors(4, 6)).gains[0][1] == 1


def test_twin_parameters_that_folding_treated_alike() -> None:
    twins = [Weight(f"experts.{name}", (3, 8, 4), False, (_gain(2, 4),)) for name in ("gate", "up")]
    assert factors_target(_base(*twins), "experts", *_factors(4, 8, rank=6)).weight is twins[0]


@pytest.mark.parametrize(
    "other",
    [
        (),
        (_gain(2, 4, norm="model.layers.0.other"),),
        (_gain(2, 4, channels=torch.tensor([1, 0, 3, 2])),),
    ],
)
def test_twin_parameters_that_folding_treated_differently(other: tuple[Gain, ...]) -> None:
    weights = Weight("experts.gate", (3, 8, 4), False, (_gain(2, 4),)), Weight("experts.up", (3, 8, 4), False, other)
    with pytest.raises(CheckpointError, match=r"fit both experts\.gate and experts\.up"):
        factors_target(_base(*weights), "experts", *_factors(4, 8, rank=6))


def test_square_experts_cannot_be_told_unless_they_read_no_norm() -> None:
    square = Weight("experts.gate", (3, 4, 4), False, (_gain(2, 4),))
    with pytest.raises(CheckpointError, match=r"experts\.gate, whose matrices are square"):
        factors_target(_base(square), "experts", *_factors(4, 4, rank=6))
    unread = Weight("experts.gate", (3, 4, 4), False, ())
    assert factors_target(_base(unread), "experts", *_factors(4, 4, rank=6)).gains == ()


def test_a_convolution() -> None:
    a, b = torch.zeros(2, 4, 3), torch.zeros(6, 2, 1)
    assert factors_target(_base(Weight("conv.weight", (6, 4, 3), False, ())), "conv", a, b).gains == ()
    with pytest.raises(CheckpointError, match="conv, a convolution that folding scaled"):
        factors_target(_base(Weight("conv.weight", (6, 4, 3), False, (_gain(1, 4),))), "conv", a, b)
    with pytest.raises(CheckpointError, match="do not fit"):
        factors_target(_base(Weight("conv.weight", (6, 4, 5), False, ())), "conv", a, b)


@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        ((6, 4), _factors(6, 4)),  # the sides exchanged
        ((6, 4), _factors(4, 5)),
        ((6, 4), (torch.zeros(2, 4), torch.zeros(6, 3))),  # two ranks
        ((3, 8, 4), _factors(4, 8, rank=7)),  # a rank that 3 experts cannot share
        ((3, 8, 4), _factors(4, 7, rank=6)),
    ],
)
def test_shapes_that_do_not_fit(shape: tuple[int, ...], factors: tuple[torch.Tensor, torch.Tensor]) -> None:
    name = "q.weight" if len(shape) == 2 else "q.gate"
    with pytest.raises(CheckpointError, match=r"do not fit .*; give the base that the adapter was trained for"):
        factors_target(_base(Weight(name, shape, False, ())), "q", *factors)


def test_unknown_modules() -> None:
    base = _base(Weight("q.weight", (6, 4), False, ()))
    with pytest.raises(CheckpointError, match="changes 'k', which the base does not have"):
        factors_target(base, "k", *_factors(4, 6))
    with pytest.raises(CheckpointError, match=r"replaces 'score\.weight', which the base does not store"):
        copy_target(base, "score.weight", torch.zeros(2, 4))


@pytest.mark.parametrize("module", [NORM, "layers.0.norm", "model.layers.0.post_norm", f"{NORM}.base_layer"])
def test_norms_are_refused_folded_or_not(module: str) -> None:
    base = _base(*(Weight(f"{norm}.{part}", (4,), False, ()) for norm in (NORM,) for part in ("weight", "bias")))
    with pytest.raises(CheckpointError, match=r"changes the norm model\.layers\.0\."):
        factors_target(base, module, *_factors(4, 4))
    for part in ("weight", "bias"):
        with pytest.raises(CheckpointError, match="merge the adapter into the original model, then fold that"):
            copy_target(base, f"{module.removesuffix('.base_layer')}.{part}", torch.zeros(4))


def test_a_weight_that_was_scaled_in_parts() -> None:
    base = _base(Weight("q.weight", (6, 4), False, None))
    with pytest.raises(CheckpointError, match=r"q\.weight, in which folding scaled some parts"):
        factors_target(base, "q", *_factors(4, 6))
    with pytest.raises(CheckpointError, match=r"q\.weight, in which folding scaled some parts"):
        copy_target(base, "q.weight", torch.zeros(6, 4))


def test_copies() -> None:
    head, bias = Weight("lm_head.weight", (9, 4), False, ()), Weight("q.bias", (6,), False, ())
    base = _base(head, bias)
    assert copy_target(base, "lm_head.weight", torch.zeros(11, 4)) is head  # two tokens were added
    assert copy_target(base, "q.bias", torch.zeros(6)) is bias
    for path, shape in (("lm_head.weight", (9, 5)), ("lm_head.weight", (9,)), ("q.bias", (1,)), ("q.bias", (6, 1))):
        with pytest.raises(CheckpointError, match="give the base that the adapter was trained for"):
            copy_target(base, path, torch.zeros(shape))
