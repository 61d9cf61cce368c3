"""Each identity against the plain form, in fp64, where what differs is the order of a few roundings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnorm import attention_algebra as algebra
from flashnorm.errors import ShapeError
from flashnorm.kernels.decode.reference import rms_norm, rotate

UNIT = 2.0**-53
# (width of a head, half of its turning channels), partly turning heads and heads that do not turn among them.
SHAPES = st.sampled_from([(2, 1), (8, 4), (8, 2), (16, 8), (24, 6), (8, 0)])
POSITIONS = st.integers(0, 100_000)


def drawn(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tables(position: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position * 10_000.0 ** -(torch.arange(rotary, dtype=torch.float64) / max(1, rotary))
    return angles.cos(), angles.sin()


def near(actual: torch.Tensor, expected: torch.Tensor, operations: int) -> bool:
    """Within so many roundings of the largest value."""
    return bool((actual - expected).abs().max() <= operations * UNIT * expected.abs().max())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=SHAPES, position=POSITIONS, interleaved=st.booleans(), seed=st.integers(0, 99), power=st.integers(-30, 30))
def test_a_scalar_is_carried_by_the_tables(shape, position, interleaved, seed, power):
    width, rotary = shape
    x, (cos, sin) = drawn(seed, 3, width), tables(position, rotary)
    scale = (drawn(seed + 1, 3, 1).abs() + 0.1) * 2.0**power
    plain = rotate(x * scale, cos, sin, interleaved=interleaved)
    carried = rotate(x, *algebra.scaled_rotation(cos, sin, scale), interleaved=interleaved)
    carried[..., 2 * rotary :] *= scale  # what does not turn sees no table
    assert near(carried, plain, 6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=SHAPES, position=POSITIONS, interleaved=st.booleans(), seed=st.integers(0, 99))
def test_a_gain_is_a_part_of_the_tables(shape, position, interleaved, seed):
    width, rotary = shape
    x, gain, (cos, sin) = drawn(seed, 3, width), drawn(seed + 1, width), tables(position, rotary)
    plain = rotate(x * gain, cos, sin, interleaved=interleaved)
    own, other = algebra.gain_tables(cos, sin, gain, interleaved=interleaved)
    assert own.shape == other.shape == (2 * rotary,)
    turned = algebra.turn(x, own, other, interleaved=interleaved)
    turned[..., 2 * rotary :] *= gain[2 * rotary :]
    assert near(turned, plain, 6)


def test_a_gain_in_the_tables_without_the_exchange_is_seen():
    x, gain, (cos, sin) = drawn(0, 3, 8), drawn(1, 8), tables(5, 4)
    own, other = algebra.gain_tables(cos, sin, gain, interleaved=False)
    wrong = other / gain[algebra.partners(4, interleaved=False)] * gain  # each channel's own gain on its partner
    plain = rotate(x * gain, cos, sin, interleaved=False)
    assert not near(algebra.turn(x, own, wrong, interleaved=False), plain, 1e6)


def scores(q, k, q_gain, k_gain, rotary, at, interleaved):
    """⟨R(m) (a ⊙ q), R(n) (b ⊙ k)⟩ after QK-norm, for every pair of a query and a key."""
    q, k = (rms_norm(x, 1e-6, gain) for x, gain in ((q, q_gain), (k, k_gain)))
    q, k = (rotate(x, *tables(m, rotary), interleaved=interleaved) for x, m in zip((q, k), at, strict=True))
    return q @ k.T


def pairwise(gain: torch.Tensor, rotary: int, interleaved: bool) -> torch.Tensor:
    """The gain with both channels of each turning pair given that of the first."""
    alike = gain.clone()
    exchanged = algebra.partners(rotary, interleaved=interleaved)
    alike[: 2 * rotary] = gain[torch.minimum(torch.arange(2 * rotary), exchanged)]
    return alike


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    shape=SHAPES, at=st.tuples(POSITIONS, POSITIONS), interleaved=st.booleans(), seed=st.integers(0, 99),
    alike=st.booleans(),
)  # fmt: skip
def test_the_query_takes_over_the_key_s_gain_where_it_commutes_with_the_turn(shape, at, interleaved, seed, alike):
    width, rotary = shape
    q, k, a, b = drawn(seed, 3, width), drawn(seed + 1, 4, width), drawn(seed + 2, width), drawn(seed + 3, width)
    b = pairwise(b, rotary, interleaved) if alike else b
    new_a, new_b = algebra.shared_gains(a, b, rotary, interleaved=interleaved)
    assert bool((new_b[2 * rotary :] == 1).all())
    assert bool((new_b == 1).all()) == (alike or rotary == 0)
    before = scores(q, k, a, b, rotary, at, interleaved)
    after = scores(q, k, new_a, new_b, rotary, at, interleaved)
    # Sums of `width` products of a handful of factors; by Cauchy and Schwarz none is larger than |a q| |b k|.
    largest = width * float((a * b).abs().max() if alike or rotary == 0 else a.abs().max() * b.abs().max())
    assert bool((after - before).abs().max() <= (width + 12) * UNIT * max(largest, float(before.abs().max())))


def test_taking_over_a_gain_that_does_not_commute_is_seen():
    q, k, a, b = drawn(0, 3, 8), drawn(1, 4, 8), drawn(2, 8), drawn(3, 8)
    before = scores(q, k, a, b, 4, (7, 2), False)
    after = scores(q, k, a * b, torch.ones(8, dtype=torch.float64), 4, (7, 2), False)
    assert (after - before).abs().max() > 0.1 * before.abs().max()


def test_partners_are_each_other_s():
    for rotary in (0, 1, 5):
        for interleaved in (False, True):
            found = algebra.partners(rotary, interleaved=interleaved)
            assert torch.equal(found[found], torch.arange(2 * rotary))
            assert not (found == torch.arange(2 * rotary)).any()


def test_gains_that_do_not_fit_are_refused():
    cos, sin = tables(3, 4)
    with pytest.raises(ShapeError, match="does not cover 8 turning channels"):
        algebra.gain_tables(cos, sin, torch.ones(6), interleaved=False)
    with pytest.raises(ShapeError, match="do not fit 8 turning channels"):
        algebra.shared_gains(torch.ones(8), torch.ones(6), 4, interleaved=False)
