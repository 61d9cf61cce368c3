"""`flashnorm bench e2e`: what is refused before anything is measured, and what is left when a row fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashnorm.bench import limits
from flashnorm.bench import record as records
from flashnorm.bench.e2e import measure as measuring
from flashnorm.bench.e2e.record import make_record
from flashnorm.bench.e2e.rows import ROWS
from flashnorm.cli.main import main
from flashnorm.errors import CheckFailed
from tests.bench.e2e.records import CEILINGS, SOURCE, measured, rows

FIRST, SECOND = "decode-smollm2-135m", "decode-qwen3-1.7b"


def run(*arguments: str) -> int:
    try:
        main(["bench", "e2e", *arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("flashnorm: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine where rows are measured at once; which ones were."""
    names: list[str] = []

    def measure(row, device, ceilings, *, compiled, tuned):
        names.append(row.name)
        return measured(row.name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(limits, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(
        records,
        "provenance",
        lambda device, command, commit: {**SOURCE, "command": command, "commit": commit or "c0ffee"},
    )
    monkeypatch.setattr(measuring, "measure", measure)
    return names


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would run, for minutes")
def test_without_a_gpu_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a CUDA GPU" in refused(capsys, "--record", str(tmp_path / "record.json"))
    assert list(tmp_path.iterdir()) == []


def test_unknown_rows_and_idle_options_are_refused(capsys: pytest.CaptureFixture[str], ran: list[str]) -> None:
    assert "there is no row 'x'" in refused(capsys, "--row", FIRST, "--row", "x")
    assert "--no-compiled" in refused(capsys, "--tuned", "--no-compiled")
    assert ran == []


def test_all_rows_and_both_tables(capsys: pytest.CaptureFixture[str], ran: list[str]) -> None:
    assert run() == 0
    assert ran == [row.name for row in ROWS]
    printed = capsys.readouterr()
    assert all(name in printed.out for name in ran)
    assert "throughput over batch 1" in printed.out
    assert printed.err.count("\n") == len(ROWS)


def test_rows_join_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: list[str]) -> None:
    path = tmp_path / "record.json"
    for name in (SECOND, FIRST):
        assert run("--row", name, "--record", str(path), "--json", "--quiet") == 0
    record = json.loads(path.read_text())
    assert [row["name"] for row in record["rows"]] == [FIRST, SECOND]
    printed = capsys.readouterr()
    assert json.JSONDecoder().raw_decode(printed.out)[0]["rows"][0]["name"] == SECOND
    assert printed.err == ""


def test_a_record_of_another_commit_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: list[str]
) -> None:
    path = tmp_path / "record.json"
    records.write(make_record(rows(), {**SOURCE, "commit": "old"}), path)
    before = path.read_text()
    assert "another commit" in refused(capsys, "--record", str(path), "--commit", "new")
    assert (ran, path.read_text()) == ([], before)


def test_a_wrong_row_leaves_the_others_and_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measuring.measure

    def measure(row, *arguments, **options):
        if row.name == FIRST:
            raise CheckFailed(f"{FIRST}: flashnorm is wrong")
        return right(row, *arguments, **options)

    monkeypatch.setattr(measuring, "measure", measure)
    path = tmp_path / "record.json"
    assert run("--row", FIRST, "--row", SECOND, "--record", str(path)) == 1
    assert f"flashnorm: {FIRST}: flashnorm is wrong" in capsys.readouterr().err
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == [SECOND]


def test_rows_measured_before_an_error_are_in_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measuring.measure

    def measure(row, *arguments, **options):
        if row.name == SECOND:
            raise RuntimeError("out of memory")
        return right(row, *arguments, **options)

    monkeypatch.setattr(measuring, "measure", measure)
    path = tmp_path / "record.json"
    assert run("--row", FIRST, "--row", SECOND, "--record", str(path)) == 70
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == [FIRST]
