"""Graph replay against eager steps: a sound program's are the same bits, and what a capture froze is found."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashnorm
from flashnorm.runtime import level_two
from flashnorm.runtime.decode import program
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.step import TorchStep
from flashnorm.verify import suite
from flashnorm.verify.determinism import own_stream
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.races.recorder import find_races
from tests.runtime.decode.models import tiny as decoder
from tests.verify import host_graphs


class WholeCache(TorchStep):
    """A step that can be captured: it attends to the cache's whole length, behind a mask, as the kernels do."""

    def _attention(self, x, by, cache, slots, at, reach):
        return super()._attention(x, by, cache, slots, at, cache[0].shape[2])


def _determinism(folder: Path, step: type[TorchStep], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Of a folder's decode program whose steps are captured, on the host."""
    host_graphs.install(monkeypatch)
    monkeypatch.setattr(program, "TorchStep", step)
    monkeypatch.setattr(level_two, "Program", partial(Program, graphs=True))
    monkeypatch.setattr(suite, "_captures", lambda model: True)
    report = flashnorm.battery(folder, level="quick", accelerated=True, only=["determinism"])
    return report["determinism"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay")
    decoder("llama").save_pretrained(path)
    return path


def test_a_sound_program_replays_the_bits_of_its_eager_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _determinism(folder, WholeCache, monkeypatch)
    assert outcome.passed, outcome.meaning
    assert [figure.name for figure in outcome.figures] == [
        "other_bits (prefill)",
        "other_bits (decode)",
        "other_bits (replay against eager)",
    ]


def test_a_length_that_the_capture_froze_is_found_by_replay_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain step asks the host how far the longest sequence reaches; every replay answers as the capture did."""
    outcome = _determinism(folder, TorchStep, monkeypatch)
    assert [figure.name for figure in outcome.failures] == ["other_bits (replay against eager)"]
    assert "replayed graphs give other bits than the same steps launched one by one at 16 of 17" in outcome.meaning
    assert "from 1 on" in outcome.meaning  # the first logits are the prefill's


def test_what_captures_nothing_has_nothing_to_replay(folder: Path) -> None:
    report = flashnorm.battery(folder, level="quick", accelerated=True, only=["determinism"])
    assert len(report["determinism"].figures) == 2


def test_the_load_runs_on_a_stream_of_its_own() -> None:
    """Played by the recorder, whose streams have numbers: 0 is the main one."""
    current: list[int] = []

    def operation(x: Tensor) -> Tensor:
        with own_stream(torch.device("cuda")) as wait:
            current.append(torch.cuda.current_stream().number)
            wait()
        current.append(torch.cuda.current_stream().number)
        return x + 1

    assert find_races(operation, (torch.empty(2),), calls=1) == []
    assert current == [1, 0]
    with own_stream(torch.device("cpu")) as wait:
        wait()
