from __future__ import annotations

import pytest
import torch

from flashnorm.runtime.decode.matching import activation_of, by_head, likeness, multiplier, rotation, same
from flashnorm.runtime.decode.reference import ACTIVATIONS, rotate
from flashnorm.runtime.decode.spec import Rope

TOKENS, HEADS, WIDTH = 7, 3, 8


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("m", [1.0, 12.0, 0.22, 1 / 6, 48**0.5])
def test_a_multiplier_survives_the_roundings_of_a_larger_stream(m):
    branch, stream = normal(40, 64), 30 * normal(40, 64, seed=1)
    moved = (stream + m * branch) - stream  # in fp32: most of the last digits are lost
    found = multiplier(moved, branch)
    assert found == pytest.approx(m, rel=1e-6)
    if m in (1.0, 12.0, 0.22):
        assert found == m
    assert multiplier(m * branch * (1 + 1e-4), branch) != m


def test_same_is_up_to_the_order_of_additions():
    x, w = normal(5, 1000), normal(1000, 5, seed=1)
    backwards = x.flip(1) @ w.flip(0)
    assert same(x @ w, backwards)
    assert not same(x @ w, backwards * (1 + 1e-5))
    assert not same(x @ w, backwards.t())
    assert likeness(x, 3 * x) == pytest.approx(1)
    assert likeness(x, -x) == pytest.approx(-1)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_told_apart(name):
    gate, up = 3 * normal(5, 200), normal(5, 200, seed=1)
    assert activation_of(up, gate, ACTIVATIONS[name](gate) * up) == name
    assert activation_of(gate, None, ACTIVATIONS[name](gate)) == name
    assert activation_of(up, gate, gate * up) is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [2, 4])
def test_rotations_are_told_apart(interleaved, rotary):
    angles = torch.arange(TOKENS)[:, None] * torch.logspace(0, -1, rotary)
    rope = Rope(angles.cos(), angles.sin(), interleaved)
    before = normal(TOKENS, HEADS, WIDTH)
    after = rotate(before[None], rope, torch.arange(TOKENS)[None])[0]
    for twice in (torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1), angles):
        found = rotation(before, after, twice.cos(), twice.sin())
        assert found is not None
        assert found.interleaved == interleaved
        assert torch.equal(found.of(twice.cos()), rope.cos)
    assert rotation(before, after.roll(1, 0), angles.cos(), angles.sin()) is None


def test_heads_lie_in_either_order():
    value = normal(TOKENS, HEADS, WIDTH)
    assert torch.equal(by_head(value.transpose(0, 1)[None], HEADS, WIDTH, TOKENS), value)
    assert torch.equal(by_head(value.reshape(1, TOKENS, -1), HEADS, WIDTH, TOKENS), value)
    assert by_head(value, HEADS + 1, WIDTH, TOKENS) is None
