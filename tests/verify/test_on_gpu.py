"""On a GPU: the battery on a decode program that runs its kernels in captured graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import flashnorm
from flashnorm.verify import determinism
from flashnorm.verify.determinism import own_stream
from tests.runtime.decode.models import tiny as decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU; test_no_false_alarm.py runs everywhere"
    ),
]


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_healthy_model_passes_on_the_device(accelerated: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder("llama", dtype).save_pretrained(tmp_path)
    report = flashnorm.battery(tmp_path, level="quick", accelerated=accelerated, device="cuda")
    assert report.passed, report.verdict
    replays = [figure.name for figure in report["determinism"].figures if "replay" in figure.name]
    assert replays == (["other_bits (replay against eager)"] if accelerated else [])


def test_the_load_keeps_another_stream_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[torch.cuda.Stream] = []

    @contextmanager
    def watched(device: torch.device) -> Iterator[Callable[[], None]]:
        with own_stream(device) as wait:
            streams.append(torch.cuda.current_stream())
            yield wait

    monkeypatch.setattr(determinism, "own_stream", watched)
    before, deadline = torch.cuda.current_stream(), time.monotonic() + 10
    with determinism.busy(torch.device("cuda")):
        assert torch.cuda.current_stream() == before != streams[0]
        while streams[0].query():  # between two rounds it is idle for a moment
            assert time.monotonic() < deadline
