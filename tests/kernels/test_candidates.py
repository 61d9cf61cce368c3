from __future__ import annotations

import pytest
import torch

from flashnorm.kernels.candidates import candidates
from flashnorm.kernels.configs import TmaGemm
from flashnorm.kernels.dispatch import Problem, fits


@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize(("k", "n"), [(576, 960), (4096, 6144)])
@pytest.mark.parametrize("gated", [False, True])
def test_every_candidate_can_run_and_none_comes_twice(m, k, n, gated):
    found = candidates(m, k, n, gated=gated)
    assert len(found) == len(set(found)) > 0
    problem = Problem(m, k, n, torch.bfloat16, gained=False, addressable=True, gated=gated, hopper=True)
    assert all(fits(config, problem) for config in found)


@pytest.mark.parametrize(("m", "some"), [(16, False), (256, True), (1024, True), (4096, False)])
def test_two_blocks_may_share_x_where_that_may_pay(m, some):
    found = [c for c in candidates(m, 4096, 6144) if isinstance(c, TmaGemm) and c.cluster > 1]
    assert bool(found) == some
    assert all(c.norm == "beside" and c.beside % c.cluster == 0 and c.block_m <= m for c in found)
