from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from flashnorm.errors import CheckFailed
from flashnorm.kernels import dispatch, first_use, learned, rms_linear, tuning
from flashnorm.kernels.bounds import exceeds, expected_rms_linear
from flashnorm.kernels.configs import Gemv, NormLinear, SplitK
from flashnorm.kernels.dispatch import Problem
from flashnorm.kernels.tuning import Shape, Tuned
from tests.kernels import cases

GPU = torch.device("cuda", 0)
PROBLEM = partial(Problem, k=512, n=256, dtype=torch.bfloat16, gained=False, addressable=True)


@pytest.fixture
def searches(monkeypatch, tmp_path):
    """A GPU without a shipped table, and a search that always ends with `Gemv(1)`; the list of what was searched."""
    done: list[Shape] = []

    def best_of(shape, configs, device):
        done.append(shape)
        return Tuned(shape, Gemv(1), 3.0, 0.1, len(configs))

    monkeypatch.setenv("FLASHNORM_CACHE", str(tmp_path))
    monkeypatch.delenv("FLASHNORM_AUTOTUNE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(dispatch, "triton_runs", lambda device: True)
    monkeypatch.setattr(tuning, "candidates_of", lambda shape: [Gemv(1), Gemv(2)])
    monkeypatch.setattr(tuning, "best_of", best_of)
    monkeypatch.setattr(first_use, "_tried", set())
    dispatch.forget_tables()
    yield done
    dispatch.forget_tables()


def test_a_shape_is_searched_once_and_kept(searches, monkeypatch):
    assert dispatch.choose(PROBLEM(m=1), GPU) == Gemv(1)
    assert dispatch.choose(PROBLEM(m=1), GPU) == Gemv(1)
    assert searches == [Shape(1, 512, 256)]
    monkeypatch.setattr(first_use, "_tried", set())  # another process
    dispatch.forget_tables()
    assert dispatch.choose(PROBLEM(m=1), GPU) == Gemv(1)
    assert len(searches) == 1
    (entry,) = json.loads(learned.table_path(GPU).read_text())["entries"]
    assert entry["microseconds"] == 3.0


def test_numbers_of_rows_share_a_search(searches):
    for m in (17, 33, 64):
        dispatch.choose(PROBLEM(m=m), GPU)
    assert searches == [Shape(64, 512, 256)]


@pytest.mark.parametrize(("answer", "capability", "searched"), [("0", (8, 9), 0), ("", (9, 0), 0), ("1", (9, 0), 1)])
def test_when_it_happens(searches, monkeypatch, answer, capability, searched):
    monkeypatch.setenv("FLASHNORM_AUTOTUNE", answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dispatch.choose(PROBLEM(m=1), GPU)
    assert len(searches) == searched


def test_not_while_a_graph_is_captured_but_after_it(searches, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert isinstance(dispatch.choose(PROBLEM(m=1), GPU), Gemv)
    assert searches == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dispatch.choose(PROBLEM(m=1), GPU)
    assert len(searches) == 1


@pytest.mark.parametrize("changes", [{"gained": True}, {"dtype": torch.float32}])
def test_operands_that_few_families_take_are_not_searched(searches, changes):
    dispatch.choose(PROBLEM(m=1, **changes), GPU)
    assert searches == []


def test_a_search_that_finds_nothing_right_is_said_and_not_repeated(searches, monkeypatch, caplog):
    def none_is_right(shape, configs, device):
        searches.append(shape)
        raise CheckFailed("no configuration is right")

    monkeypatch.setattr(tuning, "best_of", none_is_right)
    for _ in range(2):
        assert isinstance(dispatch.choose(PROBLEM(m=1), GPU), Gemv)
    assert len(searches) == 1
    assert "the general rules decide" in caplog.text


def test_a_few_of_each_family():
    configs = [Gemv(n) for n in range(20)] + [SplitK(), NormLinear(1), NormLinear(2)]
    few = first_use.few_of_each(configs)
    assert len([c for c in few if isinstance(c, Gemv)]) == first_use._OF_EACH_FAMILY
    assert {SplitK(), NormLinear(1), NormLinear(2)} <= set(few)
    assert len(set(few)) == len(few)


def test_only_what_is_right_is_timed(monkeypatch):
    timed = []
    monkeypatch.setattr(tuning, "fault", lambda shape, config: "wrong" if config == Gemv(1) else "")
    monkeypatch.setattr(tuning, "_choose", lambda shape, verdicts, device: timed.append(verdicts))
    tuning.best_of(Shape(1, 64, 64), [Gemv(1), Gemv(2)], GPU)
    assert timed == [{Gemv(1): "wrong", Gemv(2): ""}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; the search itself is replaced above")
def test_a_real_search(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHNORM_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHNORM_AUTOTUNE", "1")
    dispatch.forget_tables()
    operands = cases.case(16, 640, 320, torch.bfloat16)
    out = rms_linear(operands.x, operands.weight, cases.EPS)
    assert exceeds(out, expected_rms_linear(operands.x, operands.weight, cases.EPS, rounds_input=True)) <= 1
    assert (640, 320, False) in learned.read(learned.table_path(operands.x.device))
    dispatch.forget_tables()
