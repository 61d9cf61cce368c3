"""The recorder: sound operations have no race, each planted one has, and `torch.cuda` is as it was afterwards."""

from __future__ import annotations

import pytest
import torch

from flashnorm.kernels.two_stream import overlapped_rms_linear
from flashnorm.verify.races.recorder import find_races
from tests.faults.two_streams import FAULTS, JoinedOutside, TwoStreams

X = torch.empty(4, 48, dtype=torch.bfloat16)
WEIGHT = torch.empty(32, 48, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "operation",
    [overlapped_rms_linear, TwoStreams(), JoinedOutside()],
    ids=["shipped", "with buffers of its own", "with two ends to wait for"],
)
def test_a_sound_operation_has_no_race(operation) -> None:
    assert find_races(operation, (X, WEIGHT, 1e-5), calls=3) == []


@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_race_is_found(name: str) -> None:
    assert find_races(FAULTS[name](), (X, WEIGHT, 1e-5), calls=3)


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        # The main stream multiplies the product, (rows, outputs), by the scale, (rows, 1); the side stream reads x,
        # (rows, width).
        ("the matmul's end event missing", {"4x32"}),
        ("the sum of squares' end event missing", {"4x1"}),
        ("the fork event missing", {"4x1", "4x48"}),
    ],
)
def test_each_event_that_is_missing_is_told_by_what_it_guarded(name: str, buffers: set[str]) -> None:
    races = find_races(FAULTS[name](), (X, WEIGHT, 1e-5), calls=3)
    assert {race.buffer.split()[1] for race in races} == buffers
    touched = {access.what for race in races for access in (race.first, race.second)}
    assert {"aten.copy_.default", "aten.mul.Tensor"} <= touched


def test_a_race_says_which_buffer_and_which_operations() -> None:
    race = find_races(FAULTS["implicit join"](), (X, WEIGHT, 1e-5), calls=1)[0]
    assert str(race) == (
        "the 4x1 result of aten.empty.memory_format: aten.copy_.default on stream 1 (writes) and aten.mul.Tensor on "
        "stream 0 (reads) are not ordered"
    )


def test_the_host_orders_what_it_waits_for() -> None:
    def waits(x: torch.Tensor, synchronize: bool) -> torch.Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        if synchronize:
            side.synchronize()
        y.record_stream(torch.cuda.current_stream())
        return y * 2

    assert find_races(waits, (X, True)) == []
    assert find_races(waits, (X, False))


def test_a_view_touches_nothing() -> None:
    def views(x: torch.Tensor) -> torch.Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        return x.view(-1).reshape(2, -1).t()  # shape alone: read only by what comes next

    def reads(x: torch.Tensor) -> torch.Tensor:
        return views(x).clone()

    assert find_races(lambda x: views(x) is None, (X,), calls=1) == []
    assert find_races(reads, (X,), calls=1)


def test_assignments_are_writes() -> None:
    def assigns(x: torch.Tensor, ordered: bool) -> torch.Tensor:
        side = torch.cuda.Stream()
        if ordered:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[1:3] = 2.0
            x[torch.tensor([0, 3])] = x[:2]
        torch.cuda.current_stream().wait_stream(side)
        x.record_stream(side)
        return x + 1

    assert find_races(assigns, (X, True)) == []
    assert find_races(assigns, (X, False))


def test_torch_is_as_it_was_whatever_happens() -> None:
    before = torch.cuda.Stream, torch.cuda.current_stream, torch.Tensor.record_stream

    def breaks(x: torch.Tensor) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        find_races(breaks, (X,))
    assert (torch.cuda.Stream, torch.cuda.current_stream, torch.Tensor.record_stream) == before
