"""A capture that CUDA refuses, on a model of the device: torch's own `graph` context runs, its C++ side is played.

The model does what `aten/src/ATen/cuda/CUDAGraph.cpp` and the caching allocator do when `cudaStreamEndCapture` fails:
before torch 2.13 the allocator's pool and the generator are not told that the capture ended.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashnorm.verify.races import check, graphs
from flashnorm.verify.races.capture import NotCaptured, capture

DEVICE = torch.device("cuda", 0)


class _Stream:
    device = DEVICE


class _Device:
    """What a failed capture can leave wrong, and what makes the next one fail."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.main = self.current = _Stream()
        self.pools: set[tuple[int, int]] = set()
        self.draws = True  # whether the random generator may be used outside of a capture
        self.unjoined = self.invalid = False
        self.written = True

    def end_pool(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def empty_cache(self) -> None:
        assert not self.pools, "captures_underway.empty() INTERNAL ASSERT FAILED"

    @property
    def clean(self) -> bool:
        return self.current is self.main and not self.pools and self.draws


def _error(code: int, words: str) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error: {words}\nCompile with `TORCH_USE_CUDA_DSA`")
    error.error_code = code
    return error


def _graph_class(device: _Device) -> type:
    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            self.keeps, self.ready = keep_graph, False

        def capture_begin(self, pool: tuple[int, int] = (1, 0), **_: Any) -> None:
            device.draws, self.pool_id = False, pool
            device.pools.add(pool)

        def capture_end(self) -> None:
            code = 901 if device.invalid else 904 if device.unjoined else 0
            device.invalid = device.unjoined = False  # all streams leave capture mode, come what may
            if device.version >= "2.13" or not code:
                device.end_pool(0, self.pool_id)
                device.draws = True
            if code:
                raise _error(code, "capturing stream has unjoined work")

        def instantiate(self) -> None:
            self.ready = True

        def debug_dump(self, path: str) -> None:
            if self.keeps and device.written:
                with open(path, "w") as file:
                    file.write('"a"[label="square"];\n"b"[label="fill"];\n"a" -> "b";\n')

    return Graph


@pytest.fixture(params=["2.11", "2.13"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Device:
    device = _Device(request.param)
    played = {
        "CUDAGraph": _graph_class(device),
        "Stream": _Stream,
        "current_stream": lambda device_=None: device.current,
        "set_stream": lambda stream: setattr(device, "current", stream),
        "current_device": lambda: 0,
        "_get_device_index": lambda *_, **__: 0,  # -1 without a device, for which a stream's context does nothing
        "graph_pool_handle": lambda: (0, 7),
        "synchronize": lambda device_=None: None,
        "empty_cache": device.empty_cache,
        "_sleep": lambda cycles: None,
    }
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.end_pool)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
    return device


def _forks(device: _Device) -> str:
    device.unjoined = True
    return "done"


def _waits_for_nobody(device: _Device) -> None:
    device.invalid = True
    raise _error(905, "dependency created on uncaptured work in another stream")


def test_a_capture_gives_a_graph_that_keeps_its_nodes(device: _Device) -> None:
    graph, result = capture(lambda: "done")
    assert (graph.keeps, graph.ready, result, device.clean) == (True, True, "done", True)


def test_the_plain_context_leaves_a_failure_behind(device: _Device) -> None:
    """The control: without the repair the model is as broken as the device is."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(torch.AcceleratorError), torch.cuda.graph(graph):
        _forks(device)
    assert not device.clean


@pytest.mark.parametrize(
    ("run", "words"),
    [(_forks, "is never joined"), (_waits_for_nobody, "waits for work that the capture does not hold")],
)
def test_a_refusal_for_disorder_is_said_in_words_and_leaves_nothing_behind(device: _Device, run, words: str) -> None:
    for _ in range(2):
        with pytest.raises(NotCaptured, match=words) as caught:
            capture(lambda: run(device))
        assert caught.value.disorder
        assert device.clean
    assert capture(lambda: "done")[1] == "done"


def test_another_refusal_is_no_disorder(device: _Device) -> None:
    def asks() -> None:
        device.invalid = True
        raise _error(900, "operation not permitted when stream is capturing")

    with pytest.raises(NotCaptured, match=r"CUDA error: operation not permitted when stream is capturing$") as caught:
        capture(asks)
    assert not caught.value.disorder
    assert device.clean


def test_what_the_operation_raises_is_raised_although_ending_the_capture_fails_too(device: _Device) -> None:
    def breaks() -> None:
        _forks(device)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        capture(breaks)
    assert device.clean


def test_the_graph_is_read_with_its_reader_last(device: _Device) -> None:
    graph = graphs.captured(lambda: None)
    assert list(graph.nodes.values()) == ["square", "fill"]
    assert graphs.unjoined(graph) == []
    device.written = False
    with pytest.raises(graphs.Refusal, match="did not write the captured graph"):
        graphs.captured(lambda: None)


@pytest.mark.parametrize(
    ("fault", "failures", "words"),
    [
        (_forks, ["unjoined_in_graph"], "cannot be captured in a CUDA graph: a stream that it forks is never joined"),
        (_waits_for_nobody, ["unjoined_in_graph"], "an event that was recorded in a call before"),
        (lambda device: _refuses(device, 900), [], "not permitted"),
    ],
    ids=["unjoined", "isolated", "unsupported"],
)
def test_the_verdict_of_the_check(device: _Device, fault: Any, failures: list[str], words: str) -> None:
    def operation(x: torch.Tensor) -> torch.Tensor:
        if device.pools:  # a capture is underway
            fault(device)
        return x + 1

    outcome = check._on_device(operation, (torch.ones(4),), operation, [])
    assert [figure.name for figure in outcome.failures] == failures
    assert words in (outcome.meaning or outcome.notes[0])
    assert device.clean


def _refuses(device: _Device, code: int) -> None:
    device.invalid = True
    raise _error(code, "operation not permitted when stream is capturing")
