"""The record of false alarms: what is held is not measured again, what is left out is said, and an alarm is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flashnorm
from benchmarks import false_alarms
from benchmarks.false_alarms import Subject, measure, subjects
from flashnorm.verify.outcome import BatteryReport, Outcome
from flashnorm.verify.report import Check
from tests.verify.healthy import FAMILIES
from tests.verify.tiny import save, tiny_model


def _subject(name: str, asked: list[tuple[str, int]], value: float = 0.5) -> Subject:
    def check(run: int) -> BatteryReport:
        asked.append((name, run))
        figures = (Check("distance", value, 1.0, "too far"), Check("count", 0, 0, ""))
        return BatteryReport(name, "quick", (Outcome("lag", figures), Outcome("slots", skipped="it has none")))

    return Subject(name, check)


def test_it_goes_on_where_it_stopped_and_says_when_everything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(false_alarms, "provenance", lambda *given: {"commit": "one"})
    one, two, record = _subject("one", asked), _subject("two", asked), tmp_path / "record.json"
    assert measure(record, [one], 2, everything=False)["complete"] is False
    table = measure(record, [one, two], 2, everything=True)
    assert asked == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    assert (table["complete"], table["outcomes"], table["alarms"]) == (True, 4, 0)
    assert json.loads(record.read_text()) == table
    assert table["rows"][0]["checks"] == {"lag": True, "slots": None}
    assert table["rows"][0]["largest_figure_in_bounds"] == 0.5
    monkeypatch.setattr(false_alarms, "provenance", lambda *given: {"commit": "other"})
    assert measure(record, [one], 1, everything=False)["outcomes"] == 1  # other code says nothing of this one


def test_an_alarm_is_recorded_and_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, status in ((0.5, 0), (1.5, 1)):
        monkeypatch.setattr(false_alarms, "subjects", lambda value=value: [_subject("one", [], value)])
        monkeypatch.setattr("sys.argv", ["false_alarms", str(tmp_path / f"{status}.json"), "--runs", "1"])
        with pytest.raises(SystemExit) as stop:
            false_alarms.main()
        assert stop.value.code == status
    [row] = json.loads((tmp_path / "1.json").read_text())["rows"]
    assert (row["passed"], row["verdict"], row["largest_figure_in_bounds"]) == (False, "lag: too far", 1.5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_load_of_a_checkpoint_has_the_attention_that_is_asked_for(attention: str, tmp_path: Path) -> None:
    source = save(tiny_model("llama"), tmp_path / "source")
    (tmp_path / attention).mkdir()
    folder = false_alarms._with_attention(source, tmp_path / attention, attention)
    assert flashnorm.load(folder).config._attn_implementation == attention
    (tmp_path / "absent").mkdir()
    with pytest.raises((ValueError, SystemExit), match="absent"):
        false_alarms._with_attention(source, tmp_path / "absent", "absent")


def test_the_subjects_are_those_that_the_project_promises() -> None:
    names = [subject.name for subject in subjects()]
    real = [f"SmolLM2-135M, {dtype}, {kind}" for dtype in ("bfloat16", "float32") for kind in ("sdpa", "eager")]
    assert names == [*real, *(f"tiny {family}, float32" for family in FAMILIES)]
    assert len(FAMILIES) == 20
