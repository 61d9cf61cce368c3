import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashnorm.checkpoint import edit as module
from flashnorm.checkpoint.blocks import blocks
from flashnorm.checkpoint.edit import BLOCK_ELEMENTS, Scaler, check_scales, rewritten
from flashnorm.checkpoint.header import CODES, TensorInfo
from flashnorm.checkpoint.plan import Scale, Shift, TensorEdit
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from tests.checkpoint.tiny import write_checkpoint

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def info_of(tensor):
    return TensorInfo("w", "shard", CODES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)


def scaled(tensor, *scales, limit=BLOCK_ELEMENTS):
    check_scales("w", info_of(tensor), scales)
    scaler, out = Scaler("w", info_of(tensor), scales), torch.empty_like(tensor)
    for block in blocks(tensor.shape, limit):
        span = slice(block.start, block.end)
        scaler.apply(block, tensor.view(-1)[span], out.view(-1)[span])
    return out


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def along(factor, axis, ndim):
    return factor.double().view(-1, *(1,) * (ndim - 1 - axis))


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(("shape", "axis"), [((7, 48), 1), ((48, 7), 0), ((3, 7, 5), 1), ((3, 7, 5), 2), ((48,), 0)])
@pytest.mark.parametrize("limit", [1, 10, BLOCK_ELEMENTS])
def test_the_product_is_the_exact_one_rounded_once(dtype, shape, axis, limit):
    weight, gain = random(*shape, dtype=dtype), random(shape[axis], dtype=dtype, seed=1).float()
    exact = weight.double() * along(gain, axis, len(shape))  # 48 significant bits at most, so exact in fp64
    assert torch.equal(scaled(weight, Scale(axis, gain), limit=limit), exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_gains_of_a_small_dtype_still_round_once(dtype):
    weight, rows, columns = random(9, 5, dtype=dtype), random(9, dtype=torch.bfloat16), random(5, dtype=torch.bfloat16)
    exact = weight.double() * along(rows, 0, 2) * along(columns, 1, 2)
    both = scaled(weight, Scale(0, rows.float()), Scale(-1, columns.float()))
    assert torch.equal(both, exact.to(dtype))


def test_two_gains_in_fp32_go_through_fp64():
    weight, rows, columns = random(64, 64, dtype=torch.float32), random(64).float(), random(64, seed=2).float()
    exact = weight.double() * along(rows, 0, 2) * along(columns, 1, 2)
    assert torch.equal(scaled(weight, Scale(0, rows), Scale(1, columns)), exact.float())
    assert not torch.equal(weight * rows[:, None] * columns, exact.float())  # what a second rounding would have given


def test_fp64_stays_fp64():
    weight, gain = random(4, 5), random(5, seed=1)
    assert torch.equal(scaled(weight, Scale(1, gain)), weight * gain)


@given(st.sampled_from(DTYPES[:3]), st.integers(0, 2**31), st.floats(-12, 12))
@settings(max_examples=60, deadline=None)
def test_dividing_by_the_gain_comes_back_within_one_unit(dtype, seed, exponent):
    """The bound that `unfold_checkpoint` states: at most one unit in the last place while the product is normal."""
    weight = random(64, 16, dtype=dtype, seed=seed)
    gain = (random(16, seed=seed + 1) * 2.0 ** (exponent / 4)).to(dtype).float()
    gain[gain == 0] = 1
    assume(not ((weight.double() * gain).to(dtype)[weight != 0] == 0).any())  # too many of those are refused
    folded = scaled(weight, Scale(1, gain))
    restored = scaled(folded, Scale(1, gain, divide=True))
    normal = folded.abs() >= torch.finfo(dtype).smallest_normal
    assert (steps(restored, weight)[normal] <= 1).all()
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (restored.double() - weight.double()).abs()
    unit = torch.finfo(dtype).eps * weight.double().abs() + subnormal
    assert (error <= subnormal / 2 / gain.double().abs() + unit).all()


def steps(a, b):
    """How many representable numbers lie between a and b."""
    kind = torch.int16 if a.dtype.itemsize == 2 else torch.int32
    ordered = []
    for tensor in (a, b):
        bits = tensor.view(kind).long()
        ordered.append(torch.where(bits < 0, -(bits & torch.iinfo(kind).max), bits))
    return (ordered[0] - ordered[1]).abs()


def test_steps_counts_across_zero():
    assert steps(torch.tensor([1.0, -0.0, 1e-45]), torch.tensor([1.0000001, 0.0, -1e-45])).tolist() == [1, 0, 2]


def test_zero_and_negative_gains_are_kept():
    weight = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.bfloat16)
    assert scaled(weight, Scale(1, torch.tensor([0.0, -1.5, 1.0]))).tolist() == [[0.0, 3.0, 3.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gains_that_are_not_finite(value):
    gain = torch.ones(5)
    gain[3] = value
    with pytest.raises(CheckpointError, match=f"the gain for 'w' is {value} at channel 3; repair the norm"):
        scaled(torch.ones(2, 5), Scale(1, gain))


@pytest.mark.parametrize(("axis", "length"), [(1, 4), (0, 5), (2, 5), (-3, 5)])
def test_gains_that_do_not_fit(axis, length):
    with pytest.raises(CheckpointError, match=re.escape(f"'w' of shape [2, 5] does not take {length} gains")):
        scaled(torch.ones(2, 5), Scale(axis, torch.ones(length)))


def test_only_floating_point_weights_can_be_scaled():
    with pytest.raises(CheckpointError, match="'w' is stored as I32"):
        scaled(torch.ones(2, 5, dtype=torch.int32), Scale(1, torch.ones(5)))


def test_overflow_is_refused():
    weight = torch.tensor([[1.0, 300.0]], dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"'w' does not fit its dtype .*300 becomes inf in torch\.float16"):
        scaled(weight, Scale(1, torch.tensor([1.0, 300.0])))
    largest = torch.finfo(torch.bfloat16).max
    with pytest.raises(CheckpointError, match="becomes -inf"):
        scaled(torch.tensor([[-largest]], dtype=torch.bfloat16), Scale(1, torch.tensor([2.0])))


def test_the_largest_product_that_rounds_down_is_no_overflow():
    weight = torch.tensor([[65504.0]], dtype=torch.float16)
    assert scaled(weight, Scale(1, torch.tensor([1.0002]))).item() == 65504.0  # 65517, below the 65520 that rounds up


def test_what_was_not_finite_before_is_no_overflow():
    weight = torch.tensor([[float("inf"), float("nan"), 2.0]], dtype=torch.float16)
    out = scaled(weight, Scale(1, torch.tensor([2.0, 2.0, 2.0])))
    assert out[0, 0] == float("inf")
    assert out[0, 1].isnan()
    assert out[0, 2] == 4.0


@pytest.fixture
def source(tmp_path):
    weights = {
        "linear.weight": random(6, 4, dtype=torch.bfloat16),
        "linear.bias": random(6, dtype=torch.bfloat16, seed=1),
        "conv1d.weight": random(4, 6, dtype=torch.bfloat16, seed=2),
        "experts.weight": random(3, 6, 4, dtype=torch.bfloat16, seed=3),
        "experts.bias": random(3, 6, dtype=torch.bfloat16, seed=4),
        "half.bias": torch.full((6,), 60000.0, dtype=torch.float16),
    }
    return open_source(write_checkpoint(tmp_path / "source", weights, shards=1))


def rewrite(source, name, **changes):
    return rewritten(source, name, source.tensors[name], TensorEdit(**changes))


def test_fill_and_replace(source):
    filled = rewrite(source, "linear.bias", fill=1.0)
    assert filled.dtype == torch.bfloat16
    assert filled.tolist() == [1.0] * 6
    replaced = rewrite(source, "linear.bias", replace=torch.arange(6.0))
    assert replaced.dtype == torch.bfloat16
    assert replaced.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match=re.escape("is stored as [6], not as [5]")):
        rewrite(source, "linear.bias", replace=torch.arange(5.0))


def test_a_replacement_that_overflows(source):
    with pytest.raises(CheckpointError, match=r"'half\.bias' does not fit its dtype"):
        rewrite(source, "half.bias", replace=torch.tensor([1.0] * 5 + [1e5]))
    kept = rewrite(source, "half.bias", replace=torch.tensor([1.0] * 5 + [float("inf")]))  # it was there before
    assert kept[5] == float("inf")


@pytest.mark.parametrize(("weight", "axis"), [("linear.weight", -1), ("linear.weight", 1), ("conv1d.weight", 0)])
@pytest.mark.parametrize("step", [4, BLOCK_ELEMENTS])
def test_a_norms_bias_moves_into_the_next(source, monkeypatch, weight, axis, step):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", step)
    vector = random(4, seed=9).float()
    matrix = source.read(weight).double() if axis else source.read(weight).double().T
    exact = source.read("linear.bias").double() + matrix @ vector.double()
    new = rewrite(source, "linear.bias", shifts=(Shift(weight, vector, axis),))
    assert torch.equal(new, exact.to(torch.bfloat16))


def test_a_norms_bias_moves_into_stacked_experts(source):
    vector = random(4, seed=9).float()
    exact = source.read("experts.bias").double() + source.read("experts.weight").double() @ vector.double()
    new = rewrite(source, "experts.bias", shifts=(Shift("experts.weight", vector),))
    assert torch.equal(new, exact.to(torch.bfloat16))


def test_scales_come_before_shifts(source):
    vector, gain = random(4, seed=9).float(), random(6, seed=8).float()
    old = source.read("linear.bias").double()
    exact = old * gain.double() + source.read("linear.weight").double() @ vector.double()
    new = rewrite(source, "linear.bias", scales=(Scale(0, gain),), shifts=(Shift("linear.weight", vector),))
    assert torch.equal(new, exact.to(torch.bfloat16))


def test_shifts_that_do_not_fit_or_are_not_finite(source):
    with pytest.raises(CheckpointError, match=re.escape("of shape [6] cannot take a shift of length 5")):
        rewrite(source, "linear.bias", shifts=(Shift("linear.weight", torch.ones(5)),))
    with pytest.raises(CheckpointError, match=r"the norm's bias that would move into 'linear\.bias' holds a NaN"):
        rewrite(source, "linear.bias", shifts=(Shift("linear.weight", torch.full((4,), float("nan"))),))


def test_a_shift_that_overflows(source):
    vector = 1e5 * source.read("linear.weight")[0].float()
    with pytest.raises(CheckpointError, match=r"'half\.bias' does not fit its dtype"):
        rewrite(source, "half.bias", shifts=(Shift("linear.weight", vector),))
