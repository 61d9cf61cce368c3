"""The two forms that the benchmark times compute the same, and it times neither where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.shared_gain import ONE, TWO, errors, forms, measure
from flashnorm.errors import CheckFailed
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from tests.kernels import cases, conftest  # noqa: F401  (prepares the interpreter)

cases.need_triton()

SMALL = AttentionShape(4, 2, 16, 0.25)


@pytest.fixture
def found():
    return forms(20, torch.float32, torch.device(cases.DEVICE), SMALL)


def test_both_forms_are_the_same_layer(found):
    assert found[ONE].norms.k_gain is None
    # Two roundings of a handful of factors, a sum over 21 keys and one over 16 channels, in fp32.
    assert max(errors(found).values()) <= 64 * torch.finfo(torch.float32).eps


def test_a_form_that_drops_the_key_s_gain_is_not_timed(found):
    dropped = replace(found[ONE], norms=QkNorm(1e-6, found[TWO].norms.q_gain, 1e-6, None))
    with pytest.raises(CheckFailed, match="neither is timed"):
        errors({**found, ONE: dropped})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels: needs a GPU")
def test_the_record_has_every_context():
    record = measure(3, torch.device("cuda"))
    assert [sorted(row["medians"]) for row in record["rows"]] == [[ONE, TWO]] * 3
