"""A play leaves no trace in the operation: what it keeps is exchanged, and put back, wherever it can be reached."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flashnorm.errors import Refusal
from flashnorm.verify.races.recorder import find_races
from tests.faults.two_streams import FAULTS, TwoStreams
from tests.verify.races.real import real

X = torch.empty(4, 48, dtype=torch.bfloat16)
WEIGHT = torch.empty(32, 48, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "memory freed early"])
def test_an_operation_is_after_its_play_what_it_was_before(name: str) -> None:
    """The next thing that happens to it is a run on a device, which knows no stand-ins."""
    operation = FAULTS[name]()
    before = dict(vars(operation))
    races = find_races(operation, (X, WEIGHT, 1e-5), calls=3)
    assert vars(operation) == before
    again = find_races(operation, (X, WEIGHT, 1e-5), calls=3)
    assert list(map(str, again)) == list(map(str, races)) != []


def test_real_streams_and_events_are_exchanged_and_come_back() -> None:
    """What an operation has that ran on a device before, here without one: objects of the real classes."""

    class Ran(TwoStreams):
        def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            self._scale = torch.empty(4, 1, device=x.device) if self._scale is None else self._scale
            return super().__call__(x, weight, eps)

    class Unjoined(Ran):
        def join(self, main: torch.cuda.Stream) -> None:
            pass

    for operation, sound in ((Ran(), True), (Unjoined(), False)):
        operation._side = real(torch.cuda.Stream)
        operation._fork, operation._join = (real(torch.cuda.Event) for _ in range(2))
        before = dict(vars(operation))
        assert (find_races(operation, (X, WEIGHT, 1e-5), calls=3) == []) is sound
        assert all(value is before[name] for name, value in vars(operation).items())
        assert len(vars(operation)) == len(before)


def _closing_over() -> tuple[Any, Any]:
    side = None

    def operation(x: Tensor) -> Tensor:
        nonlocal side
        side = side or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(side)
        return x + 1

    return operation, lambda: side


def _in_a_container() -> tuple[Any, Any]:
    cache: dict[str, Any] = {}

    def operation(x: Tensor, cache: dict[str, Any]) -> Tensor:
        cache.setdefault("streams", (torch.cuda.Stream(), [torch.cuda.Event()]))[0].synchronize()
        return x + 1

    return functools.partial(operation, cache=cache), lambda: cache or None


def _in_a_new_object_in_an_old_list() -> tuple[Any, Any]:
    class Workspace:
        def __init__(self) -> None:
            self.parts = {"side": torch.cuda.Stream()}

    class Holder:
        def __init__(self) -> None:
            self.pool: list[Workspace] = []

        def __call__(self, x: Tensor) -> Tensor:
            if not self.pool:
                self.pool.append(Workspace())
            self.pool[0].parts["side"].synchronize()
            return x + 1

    holder = Holder()
    return holder, lambda: holder.pool or None


def _of_a_method() -> tuple[Any, Any]:
    class Holder:
        side = None

        def run(self, x: Tensor) -> Tensor:
            self.side = self.side or torch.cuda.Stream()
            self.side.synchronize()
            return x + 1

    holder = Holder()
    return holder.run, lambda: holder.side


def _of_a_function() -> tuple[Any, Any]:
    def operation(x: Tensor) -> Tensor:
        operation.side = getattr(operation, "side", None) or torch.cuda.Stream()
        operation.side.synchronize()
        return x + 1

    return operation, lambda: getattr(operation, "side", None)


@pytest.mark.parametrize(
    "make", [_closing_over, _in_a_container, _in_a_new_object_in_an_old_list, _of_a_method, _of_a_function]
)
def test_wherever_it_is_kept(make: Any) -> None:
    operation, kept = make()
    for _ in range(2):
        assert find_races(operation, (X,)) == []
        assert kept() is None


def test_results_that_are_collected_stay() -> None:
    seen: list[int] = []

    def operation(x: Tensor) -> Tensor:
        seen.append(torch.cuda.current_stream().number)
        return x + 1

    find_races(operation, (X,), calls=3)
    assert seen == [0, 0, 0]


def test_a_stream_that_is_kept_out_of_reach_is_refused() -> None:
    @functools.lru_cache
    def side() -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def operation(x: Tensor) -> Tensor:
        side().wait_stream(torch.cuda.current_stream())
        return x + 1

    find_races(operation, (X,))
    with pytest.raises(Refusal, match="a CUDA stream that was made outside of the call that plays it"):
        find_races(operation, (X,))


def test_a_real_buffer_and_its_view_are_one() -> None:
    buffer = torch.zeros(2, 4)

    def operation(x: Tensor, ordered: bool) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            buffer.view(-1).add_(1)
        if ordered:
            main.wait_stream(side)
        return buffer * 2

    assert find_races(operation, (X, True)) == []
    assert find_races(operation, (X, False))
    assert bool((buffer == 0).all())


def test_a_constant_keeps_its_value() -> None:
    seen: list[float] = []

    def operation(x: Tensor) -> Tensor:
        seen.append(torch.tensor(1.5).item())
        return x * seen[-1]

    assert find_races(operation, (X,), calls=1) == []
    assert seen == [1.5]
