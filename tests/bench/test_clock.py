from __future__ import annotations

import pytest
import torch

from flashnorm.bench import clock
from flashnorm.bench.clock import timed


def test_only_what_follows_the_lead_is_timed(monkeypatch):
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 1000.0 if len(done) < 3 else 2e-6
        done.append(now)

    done: list[float] = []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    assert timed(step, 5, torch.device("cpu"), lead=3) == pytest.approx(2.0, rel=1e-3)
    assert len(done) == 8
