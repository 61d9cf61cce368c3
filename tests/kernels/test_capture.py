"""A graph has a cuBLAS workspace of its own: there is none before its capture, and none after it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from flashnorm.kernels.capture import capturing

gpu = pytest.mark.gpu
cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; the order of calls is tested everywhere"
)


@pytest.mark.parametrize("fails", [False, True])
def test_workspaces_are_cleared_around_the_capture(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    said: list[object] = []

    @contextmanager
    def graph(given: object, pool: object, capture_error_mode: str):
        said.append((given, pool, capture_error_mode))
        yield
        said.append("captured")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: said.append("cleared"), raising=False)

    def run() -> None:
        with capturing("graph", pool="pool", error_mode="relaxed"):
            said.append("work")
            if fails:
                raise RuntimeError("no memory")

    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            run()
    else:
        run()
    begun = ["cleared", ("graph", "pool", "relaxed"), "work"]
    assert said == [*begun, "cleared"] if fails else [*begun, "captured", "cleared"]


def _product() -> tuple[torch.Tensor, torch.Tensor]:
    """Few outputs of a long sum: the library shares the sum out, with partial sums in the workspace."""
    generator = torch.Generator("cuda").manual_seed(0)
    return tuple(torch.randn(n, 16384, device="cuda", generator=generator).bfloat16() for n in (8, 512))  # type: ignore[return-value]


@gpu
@cuda
def test_a_graph_outlives_those_that_were_captured_before_it() -> None:
    x, weight = _product()
    wanted = torch.nn.functional.linear(x, weight)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    results = []
    for graph in (first, second):
        with capturing(graph):
            results.append(torch.nn.functional.linear(x, weight))
    del first, results[0]
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile's graphs do
    torch.cuda.empty_cache()
    for _ in range(10):
        second.replay()
        filled = torch.full((64 << 20,), float("nan"), device="cuda")  # whoever gets freed memory now
        torch.cuda.synchronize()
        torch.testing.assert_close(results[0], wanted)
        assert filled.isnan().all()  # nothing was written into it
