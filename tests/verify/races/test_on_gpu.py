"""On a GPU: the implicit join is caught every time, although a unit test of the same code passes."""

from __future__ import annotations

import time

import pytest
import torch

from flashnorm.kernels import reference
from flashnorm.kernels.two_stream import overlapped_rms_linear
from flashnorm.verify.races.capture import NotCaptured, capture
from flashnorm.verify.races.check import check_races
from flashnorm.verify.races.graphs import captured, unjoined
from flashnorm.verify.races.recorder import find_races
from flashnorm.verify.races.sanitizer import sanitizer_findings
from tests.faults.two_streams import (
    BothJoinedAfterwards,
    EarlyReuse,
    ImplicitJoin,
    JoinedAfterwards,
    JoinedOutside,
    MissingFork,
    MissingMatmulEnd,
    MissingSquaresEnd,
    SharedEvent,
    TwoStreams,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; test_check.py runs everywhere"),
]


def _inputs(rows: int = 16, width: int = 576, outputs: int = 960) -> tuple[torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator, dtype=torch.float32) for n in (rows, outputs))
    return x.bfloat16().cuda(), (weight / width**0.5).bfloat16().cuda(), 1e-5


def test_a_sound_operation_passes() -> None:
    for operation in (overlapped_rms_linear, TwoStreams(), JoinedOutside()):
        outcome = check_races(operation, _inputs(), reference.rms_linear)
        assert outcome.passed, outcome.meaning
        assert [figure.name for figure in outcome.figures] == [
            "unordered_pairs",
            "wrong_when_delayed",
            "unjoined_in_graph",
        ]
        assert outcome.notes == ()  # it was captured as well


@pytest.mark.parametrize("fault", [ImplicitJoin, SharedEvent])
def test_a_missing_order_is_caught_in_every_run(fault) -> None:
    """100 of 100, in under ten seconds each, by the run itself and not by the recorder's logic."""
    inputs = _inputs()
    for _ in range(100):
        start = time.monotonic()
        outcome = check_races(fault(), inputs, reference.rms_linear)
        assert "wrong_when_delayed" in {figure.name for figure in outcome.failures}
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("fault", [MissingMatmulEnd, MissingSquaresEnd])
def test_either_end_event_that_is_missing_is_caught_by_the_run_itself(fault) -> None:
    outcome = check_races(fault(), _inputs(), reference.rms_linear)
    assert "wrong_when_delayed" in {figure.name for figure in outcome.failures}


@pytest.mark.parametrize("fault", [JoinedAfterwards, BothJoinedAfterwards])
def test_a_join_after_the_result_is_captured_and_caught_by_the_runs(fault) -> None:
    """Nothing is left unjoined at the end of the call, so that the graph's ends accuse nobody."""
    outcome = check_races(fault(), _inputs(), reference.rms_linear)
    assert [figure.name for figure in outcome.failures] == ["unordered_pairs", "wrong_when_delayed"]
    assert outcome.notes == ()


@pytest.mark.parametrize("fault", [MissingFork, EarlyReuse])
def test_a_buffer_that_is_written_too_early_is_caught(fault) -> None:
    assert not check_races(fault(), _inputs(), reference.rms_linear).passed


def test_a_unit_test_of_the_same_code_passes() -> None:
    """One call at a time, the device idle before and after: the side stream has all the time that it needs."""
    x, weight, eps = _inputs()
    operation = ImplicitJoin()
    operation(x, weight, eps)
    torch.cuda.synchronize()
    torch.testing.assert_close(operation(x, weight, eps), reference.rms_linear(x, weight, eps), rtol=2e-2, atol=2e-2)


def test_the_captured_graph_waits_for_both() -> None:
    inputs = _inputs()
    assert unjoined(captured(lambda: overlapped_rms_linear(*inputs))) == []


def test_work_that_only_the_end_of_a_call_waits_for_is_joined() -> None:
    """Two ends of the operation's own graph, both waited for: no missing join."""
    x, seen = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")

    def operation() -> torch.Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            seen.add_(1)
        y = x * 2
        main.wait_stream(side)
        return y

    graph = captured(operation)
    assert unjoined(graph) == []
    assert len(graph.nodes) == 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ImplicitJoin, "is never joined"),
        (MissingSquaresEnd, "is never joined"),
        (SharedEvent, "waits for work that the capture does not hold"),
        (MissingFork, "operation not permitted|waits for work that the capture does not hold"),
    ],
)
def test_a_refused_capture_is_said_in_words_and_leaves_nothing_behind(fault, words: str) -> None:
    inputs, operation, before = _inputs(), fault(), torch.cuda.current_stream()
    for _ in range(2):
        operation(*inputs)
    torch.cuda.synchronize()
    with pytest.raises(NotCaptured, match=words) as caught:
        capture(lambda: operation(*inputs))
    assert caught.value.disorder or fault is MissingFork  # work outside of the capture is refused for what it is, too
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()  # an internal error of the allocator's while it thinks that a capture is underway
    torch.rand(4, device="cuda")  # an error while the generator thinks so
    if (side := operation._side) is not None:
        with torch.cuda.stream(side):
            assert not torch.cuda.is_current_stream_capturing()
            torch.ones(4, device="cuda").add_(1)
    torch.cuda.synchronize()
    graph, result = capture(lambda: reference.rms_linear(*inputs))
    graph.replay()
    torch.testing.assert_close(result, reference.rms_linear(*inputs))


def test_an_operation_that_ran_on_the_device_is_played_and_runs_on() -> None:
    """It keeps real streams, events and buffers, in place of which the recorder has its own for a while."""
    for make, sound in ((TwoStreams, True), (ImplicitJoin, False)):
        operation, inputs = make(), _inputs()
        operation(*inputs)
        assert (find_races(operation, inputs, calls=3) == []) is sound
        assert isinstance(operation._side, torch.cuda.Stream)
        torch.cuda.synchronize()
        operation(*inputs)
        torch.cuda.synchronize()


def run_shipped() -> None:
    for _ in range(3):
        overlapped_rms_linear(*_inputs())


def run_implicit_join() -> None:
    operation, inputs = ImplicitJoin(), _inputs()
    for _ in range(3):
        operation(*inputs)


def test_the_sanitizer_sees_the_operation() -> None:
    assert sanitizer_findings(f"{__name__}:run_shipped") == ""
    assert "data race" in sanitizer_findings(f"{__name__}:run_implicit_join")
