from __future__ import annotations

import pytest
import torch

from flashnorm.kernels.candidates import candidates
from flashnorm.kernels.dispatch import Problem, fits


@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize(("k", "n"), [(576, 960), (4096, 6144)])
@pytest.mark.parametrize("gated", [False, True])
def test_every_candidate_can_run_and_none_comes_twice(m, k, n, gated):
    found = candidates(m, k, n, gated=gated)
    assert len(found) == len(set(found)) > 0
    problem = Problem(m, k, n, torch.bfloat16, gained=False, addressable=True, gated=gated, hopper=True)
    assert all(fits(config, problem) for config in found)
