"""Tasks of the harness: read as it writes them, side by side, judged by their standard errors, offline by default."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

import flashnorm
from flashnorm.cli.main import main
from flashnorm.errors import Refusal
from flashnorm.verify.checks import task_checks
from flashnorm.verify.harness import open_harness
from flashnorm.verify.report import VerifyReport
from flashnorm.verify.tasks import Score, TaskPair, pair_scores, read_scores
from tests.verify import harness_stub
from tests.verify.faults import folded_twice
from tests.verify.tiny import folded, save, tiny_model

FAST = ("--positions", "64", "--new-tokens", "0", "--quiet")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source = tiny_model("llama")
    models = {"source": source, "folded": folded(source), "wrong": folded_twice(source)}
    root = tmp_path_factory.mktemp("tasks")
    return {name: save(model, root / name) for name, model in models.items()}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    harness_stub.install(monkeypatch)


def _run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *map(str, arguments)])
    return int(stop.value.code or 0)


def test_scores_are_read_as_the_harness_writes_them() -> None:
    results = {
        "a": {"alias": " - a", "acc,none": 0.5, "acc_stderr,none": 0.01, "em,strict": 1, "sample_len": 7},
        "b": {
            "alias": "b",
            "ppl,none": 9.5,
            "ppl_stderr,none": "N/A",
            "nan,none": 1.0,
            "nan_stderr,none": float("nan"),
        },
    }
    assert read_scores(results) == {
        ("a", "acc"): Score(0.5, 0.01),
        ("a", "em (strict)"): Score(1.0, None),
        ("b", "ppl"): Score(9.5, None),
        ("b", "nan"): Score(1.0, None),
    }
    assert pair_scores({("a", "acc"): Score(0.5, 0.01)}, {}) == ()


def test_a_difference_counts_beyond_the_sum_of_both_errors() -> None:
    def pair(candidate: float, error: float | None = 0.02) -> TaskPair:
        return TaskPair("a", "acc", 0.5, candidate, 0.01, error)

    assert [check.passed for check in task_checks([pair(0.64)])] == [True, True]
    assert [check.passed for check in task_checks([pair(0.34)])] == [True, False]
    assert [check.passed for check in task_checks([pair(0.9, None)])] == [True]
    assert [check.passed for check in task_checks([pair(float("nan"))])] == [False, False]


@pytest.mark.usefixtures("harness")
def test_source_and_folded_stand_side_by_side(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = (*FAST, "--tasks", "tiny_next,tiny_loss")
    assert _run(folders["source"], folders["folded"], *options) == 0
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if "loss (strict)" in line and "task " not in line]
    assert row.count("±") == 2
    assert any("task tiny_next, loss (strict)" in line and "passed" in line for line in lines)
    assert _run(folders["source"], folders["wrong"], *options, "--json") == 1
    table = json.loads(capsys.readouterr().out)
    assert "task tiny_next, acc" in {check["name"] for check in table["checks"] if not check["passed"]}
    assert [pair["task"] for pair in table["tasks"]] == ["tiny_next", "tiny_next", "tiny_loss"]
    assert table["tasks"][2]["candidate_error"] is None
    assert VerifyReport.from_dict(table).to_dict() == table


@pytest.mark.usefixtures("harness")
def test_the_battery_shows_them_with_a_reference_and_without(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--level", "quick", "--quiet", "--tasks", "tiny_next", "--only", "tasks")
    assert _run("--model", folders["wrong"], "--reference", folders["source"], *options) == 1
    out, err = capsys.readouterr()
    assert "tasks: tiny_next: acc is" in err
    assert "note: tasks: tiny_next, acc: " in out
    assert _run("--model", folders["folded"], "--reference", folders["source"], *options) == 0
    capsys.readouterr()
    assert _run("--model", folders["folded"], *options) == 0
    assert "there is no reference to compare these scores with" in capsys.readouterr().out


@pytest.mark.usefixtures("harness")
def test_nothing_is_downloaded_unless_asked_for(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for download in (False, True):
        flashnorm.battery(folders["source"], level="quick", only=["tasks"], tasks=["tiny_next"], download=download)
        assert harness_stub.simple_evaluate.offline is not download
        assert huggingface_hub.constants.HF_HUB_OFFLINE is False
        assert "HF_HUB_OFFLINE" not in os.environ


def test_without_the_harness_one_sentence_says_how_to_get_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # what `import` finds where there is none
    assert _run(folders["source"], folders["folded"], *FAST, "--tasks", "tiny_next") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip().endswith(
        "tasks need the lm-eval harness (lm_eval is not installed); run `pip install 'flashnorm[eval]'`"
    )


@pytest.mark.usefixtures("harness")
def test_refusals(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refusal, match="lm-eval knows no task 'luck'"):
        open_harness(["tiny_next", "luck"])
    silent = save(tiny_model("llama"), tmp_path / "silent", with_tokenizer=False)
    assert _run(silent, silent, *FAST, "--tasks", "tiny_next") == 2
    assert "has no tokenizer, so it cannot read tasks" in capsys.readouterr().err
    assert _run("--endpoint", "http://127.0.0.1:9/v1", "--model", "tiny", "--tasks", "tiny_next") == 2
    assert "--tasks needs a model that is loaded here" in capsys.readouterr().err
    assert _run(folders["source"], folders["folded"], *FAST, "--download") == 2
    assert "--download belongs to --tasks" in capsys.readouterr().err


@pytest.mark.usefixtures("harness")
def test_what_the_harness_cannot_run_is_refused_in_its_own_words(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'tiny_next' on the Hub (offline mode is enabled)")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", absent)
    assert _run(folders["source"], folders["folded"], *FAST, "--tasks", "tiny_next") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--download lets the harness fetch its data sets): Couldn't reach 'tiny_next'" in err
