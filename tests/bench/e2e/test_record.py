from __future__ import annotations

import json

import pytest

from flashnorm.bench.e2e.record import make_record, row_record, rows_to_keep, with_row
from flashnorm.bench.e2e.rows import HF_EAGER, OURS, ROWS
from flashnorm.bench.record import write
from flashnorm.errors import OutputError
from tests.bench.e2e.records import SOURCE, measured, record, rows

LATER = {**SOURCE, "date": "2026-12-01T11:00:00+00:00", "command": "flashnorm bench e2e --row x"}


def test_a_row_keeps_every_sample_and_says_what_it_is_of():
    row = row_record(measured("decode-llama-3.2-1b"), SOURCE)
    assert row["contenders"][OURS]["samples_us"] == [499.0, 500.0, 502.0]
    assert row["contenders"][OURS]["tokens_per_second"] == 2000.0
    assert row["contenders"][OURS]["percent_of_limit"] == 93.0
    assert row["contenders"][OURS]["memory"]["beyond"] == 123_000_000
    assert row["contenders"][HF_EAGER]["tokens_per_run"] == 128
    assert (row["context"], row["batch"], row["needed"], row["limit_us"]) == ([256, 768], 1, 1_860_000_000, 465.0)
    prompt = row_record(measured("prefill-llama-3.2-1b"), SOURCE)
    assert prompt["context"] == [2048, 2048]


def test_a_record_is_json_with_provenance_and_what_is_asked():
    read = json.loads(json.dumps(record()))
    assert read == record()
    assert read["provenance"] == SOURCE
    assert [row["name"] for row in read["rows"]] == [row.name for row in ROWS]
    assert read["asked"][0] == {
        "model": "Llama-3.2-1B",
        "figure": "% of the bandwidth limit",
        "wanted": "≥ 90",
        "value": 93.0,
        "met": True,
    }


def test_rows_of_several_runs_stand_in_one_record(tmp_path):
    path = tmp_path / "record.json"
    assert rows_to_keep(path, SOURCE) == []
    write(make_record(rows()[:2], SOURCE), path)
    kept = rows_to_keep(path, LATER)
    assert kept == rows()[:2]
    again = {**rows()[1], "seconds": 99.0, "command": LATER["command"], "date": LATER["date"]}
    for row in (rows()[4], again):
        kept = with_row(kept, row)
    merged = make_record(kept, LATER)
    assert [row["name"] for row in merged["rows"]] == [ROWS[index].name for index in (0, 1, 4)]
    assert merged["rows"][1]["seconds"] == 99.0
    assert merged["provenance"]["command"] == f"{SOURCE['command']}; {LATER['command']}"
    assert merged["provenance"]["date"] == LATER["date"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("device", "NVIDIA H100"), ("commit", "fedcba"), ("packages", {"torch": "2.12.0"}), ("driver", "590")],
)
def test_rows_of_another_machine_version_or_commit_are_refused(tmp_path, key, value):
    path = tmp_path / "record.json"
    write(record(), path)
    with pytest.raises(OutputError, match=f"was measured with another {key}"):
        rows_to_keep(path, {**LATER, key: value})


def test_an_unknown_commit_is_refused_only_where_there_is_a_record(tmp_path):
    path = tmp_path / "record.json"
    nowhere = {**SOURCE, "commit": None}
    assert rows_to_keep(path, nowhere) == []
    write(make_record(rows(), nowhere), path)
    with pytest.raises(OutputError, match="pass --commit"):
        rows_to_keep(path, nowhere)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"kind": "op", "provenance": {}, "rows": []}',
        '{"kind": "e2e", "provenance": {}, "rows": 1}',
        '{"kind": "e2e", "provenance": {}, "rows": [1]}',
        '{"kind": "e2e", "provenance": 1, "rows": []}',
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(OutputError, match="name another file"):
        rows_to_keep(path, SOURCE)
    assert path.read_text() == text


def test_rows_that_no_longer_exist_are_refused(tmp_path):
    path = tmp_path / "record.json"
    write({**record(), "rows": [{**rows()[0], "name": "gone"}]}, path)
    with pytest.raises(OutputError, match="other rows"):
        rows_to_keep(path, SOURCE)


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "record.json"
    write(record(), path)
    before = path.read_text()
    with pytest.raises(TypeError):
        write({"rows": [object()]}, path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]
