"""Groups: one matrix, the same parameters; and nothing stale after whatever gives them other memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flashnorm.errors import DeviceError
from flashnorm.runtime.merging import Group
from tests.runtime.small import WIDTH, Norm

SIZES = (16, 8, 24)


def group(bias=True, offset=0.0, dtype=torch.float32):
    torch.manual_seed(0)
    norm = Norm(offset=offset)
    nn.init.normal_(norm.weight, 0.7, 0.3)
    linears = [nn.Linear(WIDTH, size, bias=bias) for size in SIZES]
    made = Group(norm.to(dtype), "weight", offset, 1e-5, [linear.to(dtype) for linear in linears])
    made.gather()
    return made


def rows(made):
    return torch.cat([linear.weight for linear in made.linears])


def test_the_parameters_are_the_same_objects_and_become_rows_of_one_matrix():
    made = group()
    before = [(p, p.clone()) for linear in made.linears for p in linear.parameters()]
    made.gather()
    assert torch.equal(made.weight, rows(made))
    assert torch.equal(made.bias, torch.cat([linear.bias for linear in made.linears]))
    after = [p for linear in made.linears for p in linear.parameters()]
    assert all(p is q and torch.equal(p, value) for (p, value), q in zip(before, after, strict=True))
    storages = {linear.weight.untyped_storage().data_ptr() for linear in made.linears}
    assert storages == {made.weight.untyped_storage().data_ptr()}
    assert made.weight.untyped_storage().nbytes() == sum(SIZES) * WIDTH * 4


def test_rows_that_lie_together_already_are_not_copied():
    made = group()
    address = made.weight.data_ptr()
    made.gather()
    assert made.weight.data_ptr() == address
    assert torch.equal(made.weight, rows(made))


def test_a_value_written_in_place_is_in_the_product():
    made = group()
    with torch.no_grad():
        made.linears[1].weight.fill_(7.0)
    assert bool((made.weight[SIZES[0] : SIZES[0] + SIZES[1]] == 7).all())


def test_rows_that_were_moved_are_gathered_again():
    made = group()
    made.linears[1].weight.data = torch.ones(SIZES[1], WIDTH)
    assert not torch.equal(made.weight, rows(made))  # what telling the group is for
    made.gather()
    assert torch.equal(made.weight, rows(made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_plus_the_weight_is_not_rounded(dtype):
    made = group(offset=1.0, dtype=dtype)
    assert made.gain.dtype == torch.float32
    assert torch.equal(made.gain, 1 + made.norm.weight.float())


def test_a_plain_gain_is_the_parameter_itself_and_a_gain_of_one_is_left_out():
    made = group()
    assert made.gain.data_ptr() == made.norm.weight.data_ptr()
    nn.init.ones_(made.norm.weight)
    made.gather()
    assert made.gain is None


def test_members_that_differ_have_no_product():
    made = group()
    made.linears[1].to(torch.float64)
    made.gather()
    with pytest.raises(DeviceError, match="converted apart"):
        made.require()
    made.linears[1].to(torch.float32)
    assert torch.equal(made.require(), rows(made))


def test_a_copy_gathers_its_own_parameters():
    made = group()
    copied = copy.deepcopy(made)
    assert copied.weight is None
    assert copied.linears[0] is not made.linears[0]
    assert torch.equal(copied.require(), rows(made))
    assert copied.weight.data_ptr() != made.weight.data_ptr()


def test_scattered_parameters_own_their_memory():
    made = group()
    before = rows(made)
    made.scatter()
    assert torch.equal(rows(made), before)
    owned = [linear.weight.untyped_storage() for linear in made.linears]
    assert [s.nbytes() for s in owned] == [size * WIDTH * 4 for size in SIZES]


def test_the_compiler_is_told_that_the_product_does_not_move():
    """CUDA graphs copy every other tensor at each replay."""
    made = group()
    assert all(t._dynamo_static_input_type for t in (made.weight, made.bias, made.gain))
