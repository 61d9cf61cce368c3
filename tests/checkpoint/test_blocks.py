from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashnorm.checkpoint.blocks import block_factor, block_shape, blocks

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@given(shapes, st.integers(1, 60))
def test_blocks_tile_the_tensor_in_order(shape, limit):
    found = list(blocks(shape, limit))
    assert [block.start for block in found] == [0, *(block.end for block in found[:-1])]
    assert found[-1].end == prod(shape)
    tensor = torch.arange(prod(shape)).view(shape)
    for block in found:
        assert block.end - block.start <= limit
        part = tensor[(*block.lead, slice(block.first, block.last))]
        assert part.shape == block_shape(shape, block)
        assert torch.equal(part.reshape(-1), torch.arange(block.start, block.end))


@given(shapes, st.integers(1, 60), st.integers(0, 3))
def test_a_factor_along_any_axis_broadcasts_in_each_block(shape, limit, axis):
    axis %= len(shape)
    factor = torch.arange(2.0, 2.0 + shape[axis])
    whole = torch.ones(shape) * factor.view(-1, *(1,) * (len(shape) - 1 - axis))
    for block in blocks(shape, limit):
        product = torch.ones(block_shape(shape, block)) * block_factor(factor, axis, len(shape), block)
        assert torch.equal(product.reshape(-1), whole.reshape(-1)[block.start : block.end])


def test_nothing_of_an_empty_tensor():
    assert list(blocks((3, 0, 2), 10)) == []
