from __future__ import annotations

import json
from statistics import median

import pytest

from flashnorm.bench.e2e.figures import figures
from tests.bench.e2e.records import record
from tools import runtime_tables
from tools.runtime_tables import AGREEMENT, PAGES, RECORD, TABLES, with_tables
from tools.tables import RECORDS, read


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime_tables, "RECORDS", tmp_path)
    path = tmp_path / f"{RECORD}.json"
    path.write_text(json.dumps(record()))
    (tmp_path / f"{AGREEMENT}.json").write_text(json.dumps(agreement_record()))
    return path


def agreement_record() -> dict[str, object]:
    """As `benchmarks.agreement` writes it."""
    program, stock = ({"divergence": d, "same_token": s} for d, s in ((0.00012, 0.995), (0.0003, 0.9875)))
    row = {"name": "one sequence", "prompts": [64], "steps": 1256, "program": program, "stock": stock}
    source = {"device": "Some CPU", "driver": None, "packages": {"torch": "2.13.0"}, "command": "python -m x"}
    source |= {"commit": "0123456789abcdef", "date": "2026-01-02T03:04:05"}
    return {"model": "Some model", "provenance": source, "rows": [row | {"divergence_ratio": 0.4}]}


def test_a_page_says_how_near_to_fp32_the_texts_are(recorded):
    text = filled()
    assert "| one sequence | 1,256 | 1.20e-04 | 3.00e-04 | 0.40 | 99.50 % | 98.75 % |" in text
    assert "Some model; Some CPU, torch 2.13.0; `python -m x` at 0123456789ab, 2026-01-02." in text


def filled() -> str:
    return "".join(with_tables(page.read_text(encoding="utf-8")) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_the_record_says(page):
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text
    assert "table:" in text


def test_every_table_stands_in_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"table:{name}:begin" in pages for name in TABLES)


def test_without_a_record_the_pages_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime_tables, "RECORDS", tmp_path)
    assert filled().count("Not measured yet") == len(TABLES)


def test_a_record_fills_every_table(recorded):
    text = filled()
    assert "Not measured yet" not in text
    assert "| Llama-3.2-1B | speed over HF eager | 16.00 | ≥ 15 | yes |" in text
    assert "| Llama-3.1-8B | % of the bandwidth limit | 93.0 | ≥ 96 | no |" in text
    assert "| decode-llama-3.2-1b | gpt-fast recipe | 1,100.0 | 3.0 | 909 | 42.3 | 0.98 | 512 |" in text
    assert "NVIDIA H200, driver 580, torch 2.11.0, transformers 5.17.0; `flashnorm bench e2e` at 0123456789ab" in text
    assert "Read bandwidth measured: 4.00 TB/s." in text


def test_level_one_stands_in_its_own_page_alone(recorded):
    accelerate, decode = (with_tables(page.read_text(encoding="utf-8")) for page in PAGES)
    line = "| level-one-llama-3.2-1b | flashnorm level one | 5,000.0 |"
    assert line in accelerate
    assert line not in decode


def test_a_changed_record_changes_the_pages(recorded):
    before = filled()
    changed = record()
    changed["rows"][1]["contenders"]["flashnorm"]["median_us"] += 100
    recorded.write_text(json.dumps(changed))
    assert filled() != before


def test_what_the_record_says_of_itself_follows_from_its_samples():
    path = RECORDS / f"{RECORD}.json"
    for kept in [record(), *([read(path)] if path.exists() else [])]:
        for row in kept["rows"]:
            for timed in row["contenders"].values():
                assert median(timed["samples_us"]) == pytest.approx(timed["median_us"], abs=2e-3)
                assert timed["error_over_stock"] <= timed["error_allowed"]
        for said, figure in zip(kept["asked"], figures(kept["rows"]), strict=True):
            assert (said["figure"], said["met"]) == (figure.asked.title, figure.met)
