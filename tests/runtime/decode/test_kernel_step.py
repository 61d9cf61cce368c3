"""Whole steps through the kernels, in Triton's interpreter where no GPU is, against the same steps in plain torch."""

from __future__ import annotations

import pytest

from flashnorm.passes.fold import fold
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from tests.kernels import cases, conftest  # noqa: F401  (prepares the interpreter)
from tests.runtime.decode.models import LENGTH, tiny, tokens

cases.need_triton()

# fp32 in both; sums in another order, and tanh and exp of another library in soft caps and activations.
CLOSE = 2e-5


@pytest.mark.parametrize(
    ("name", "folded"),
    [("llama_tied", True), ("qwen3", False), ("gemma2", True), ("glm4", False)],
)
def test_kernels_follow_plain_torch(name, folded):
    model = tiny(name, num_hidden_layers=2).to(cases.DEVICE)
    if folded:
        fold(model)
    spec = read_spec(model, max_length=LENGTH)
    plain, kernels = (Program(spec, slots=3, kernels=k, graphs=False) for k in (False, True))
    for program in (plain, kernels):
        for slot in range(3):
            program.prefill(slot, tokens(4 + 9 * slot, seed=slot))
    for active in ((2,), (0, 1)):
        given = {slot: 5 + slot for slot in active}
        expected, actual = plain.decode(given), kernels.decode(given)
        assert (actual - expected).norm() <= CLOSE * expected.norm()
    for wanted, written in zip(plain.cache.keys, kernels.cache.keys, strict=True):
        assert (wanted[:3] - written[:3]).norm() <= CLOSE * wanted[:3].norm()  # the fourth is the spare slot
