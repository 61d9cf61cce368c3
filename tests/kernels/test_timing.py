"""Which calls a timed graph holds, and what a sample is; the device's part is replaced."""

from __future__ import annotations

import pytest

from flashnorm.kernels import timing


@pytest.mark.parametrize(("copies", "calls"), [(1, 16), (3, 18), (4, 16), (16, 16), (64, 64)])
def test_all_copies_are_taken_in_turn_and_share_the_cost_of_a_replay(copies, calls, monkeypatch):
    monkeypatch.setattr(timing, "capture", lambda call, order: [call(index) for index in order])
    monkeypatch.setattr(timing, "_replay", lambda graph: 1e-3 * len(graph))  # a microsecond for each call
    taken: list[int] = []

    found = timing.time_side_by_side({"only": taken.append}, copies, repeats=5)["only"]

    assert taken == [i % copies for i in range(calls)]
    assert found.samples == pytest.approx((1.0,) * 5)
