from __future__ import annotations

import pytest
import torch

from flashnorm.kernels.cuda import counters


class _Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.device = torch.device("cpu")


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return counters._Pool(torch.device("cpu"))


def test_a_stream_keeps_its_counters_and_shares_it_with_nobody(pool):
    first, second = pool.take(_Stream(1)), pool.take(_Stream(2))
    assert first.data_ptr() == pool.take(_Stream(1)).data_ptr() != second.data_ptr()


def test_every_captured_launch_has_counters_of_its_own(pool, monkeypatch):
    eager = pool.take(_Stream(1)).data_ptr()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = [pool.take(_Stream(1)).data_ptr() for _ in range(100)]
    assert len({eager, *captured}) == 101


def test_when_they_run_out_a_captured_launch_gets_fresh_zeros(pool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    inside = {pool.take(_Stream(1)).data_ptr() for _ in range(counters._SETS - counters._STREAMS)}
    more = pool.take(_Stream(1))
    assert more.tolist() == [0] * counters.COUNTERS
    assert more.data_ptr() not in inside
    assert len(inside) == counters._SETS - counters._STREAMS
