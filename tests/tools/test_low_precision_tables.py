from __future__ import annotations

import json
import math

import pytest

from benchmarks.quantise import SCHEMES
from flashnorm.bench.fp8 import FUSED, Row
from flashnorm.bench.fp8_record import fp8_record
from flashnorm.bench.limits import Ceilings
from flashnorm.bench.op import BARE, OURS
from flashnorm.kernels.timing import Timing
from tools import low_precision_tables
from tools.low_precision_tables import PAGE, TABLES, verdict, with_tables
from tools.tables import RECORDS, read

SOURCE = {
    "device": "NVIDIA H200",
    "driver": "580",
    "packages": {"torch": "2.11.0"},
    "command": "a command",
    "commit": "0123456789abcdef",
    "date": "2026-12-01T00:00:00",
}


def _scheme(mean: float, low: float, high: float, control: tuple[float, float] = (0.001, -0.002)) -> dict:
    return {
        "weights": "int4",
        "group": 64,
        "activations": False,
        "perplexity_quantised": 30.0,
        "perplexity_folded_then_quantised": 29.0,
        "difference": {"mean": mean, "low": low, "high": high},
        "control_differences": list(control),
    }


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(low_precision_tables, "RECORDS", tmp_path)
    rows = [Row(1, 64, 32, 0.5, {name: Timing((t,) * 3) for name, t in ((BARE, 8), (FUSED, 11), (OURS, 10))}, 2.0)]
    fp8 = fp8_record(rows, Ceilings(4e6, 1.5e9), {OURS: ["_quantise_kernel", "void gemm<128, 64>(float*)"]}, SOURCE)
    quality = {"complete": True, "provenance": SOURCE, "model": "SmolLM2", "tokens": 8192, "perplexity": 23.0}
    quality |= {"perplexity_folded": 23.0, "rows": [_scheme(-0.03, -0.05, -0.01)]}
    integer = fp8_record(rows, Ceilings(4e6, 1.5e9), {}, SOURCE, "int8")
    made = {"fp8-h200": fp8, "int8-h200": integer, "quantise-smollm2": quality, "quantise-smollm2-dithered": quality}
    for name, record in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    return tmp_path


def _filled() -> str:
    return with_tables(PAGE.read_text(encoding="utf-8"))


def test_the_page_shows_what_the_records_say():
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text
    assert all(f"table:{name}:begin" in text for name in TABLES)


def test_without_records_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(low_precision_tables, "RECORDS", tmp_path)
    assert _filled().count("Not measured yet") == len(TABLES)


def test_records_fill_the_tables(records):
    text = _filled()
    assert "Not measured yet" not in text
    assert "| 64,32 | 1 | 8.00 | 11.00 | 10.00 | 0.00 | 0.909 | 1.250 | 20 | yes |" in text
    assert "in 1 of 1 rows" in text
    assert "Limit: 4.00 TB/s read, 1500 TFLOP/s." in text
    assert "Limit: 4.00 TB/s read, 1500 TOP/s." in text
    assert "flashnorm: `_quantise_kernel`, `void gemm`." in text
    line = "| int4 | 64 inputs | fp32 | 30.000 | 29.000 | -0.0300 | -0.0500 to -0.0100 | +0.0010, -0.0020 | better |"
    assert line in text
    assert "Folding first is better, for int4 weights with a scale for each 64 inputs." in text
    assert "NVIDIA H200, driver 580, torch 2.11.0; `a command` at 0123456789ab, 2026-12-01" in text


@pytest.mark.parametrize("name", list(TABLES))
def test_a_changed_record_changes_the_page(name, records):
    before = _filled()
    changed = read(records / f"{name}.json")
    if name.endswith("h200"):
        changed["rows"][0]["medians"][OURS] += 1
    else:
        changed["rows"][0]["perplexity_quantised"] += 1
    (records / f"{name}.json").write_text(json.dumps(changed))
    assert _filled() != before


def test_a_verdict_needs_an_interval_without_zero_and_more_than_the_control():
    assert verdict(_scheme(-0.03, -0.05, -0.01)) == "better"
    assert verdict(_scheme(0.03, 0.01, 0.05)) == "worse"
    assert verdict(_scheme(0.03, -0.01, 0.07)).startswith("no different")
    assert verdict(_scheme(0.03, 0.01, 0.05, (0.0, -0.04))).startswith("no different")
    assert verdict({**_scheme(0.03, 0.01, 0.05), "perplexity_quantised": 1e6}).startswith("of no matter")


@pytest.mark.parametrize("name", ["quantise-smollm2", "quantise-smollm2-dithered"])
def test_what_the_record_says_of_itself_holds_together(name):
    path = RECORDS / f"{name}.json"
    if not path.exists():
        pytest.skip("there is no record yet")
    record = read(path)
    assert record["complete"]
    for row in record["rows"]:
        mean = math.log(row["perplexity_folded_then_quantised"] / row["perplexity_quantised"])
        assert mean == pytest.approx(row["difference"]["mean"], abs=1e-9)
        assert row["difference"]["low"] <= mean <= row["difference"]["high"]
    assert {(row["weights"], row["group"], row["activations"]) for row in record["rows"]} == {
        (scheme.kind, scheme.group, scheme.activations)
        for scheme in SCHEMES
        if scheme.kind == "int4" or not name.endswith("dithered")
    }
