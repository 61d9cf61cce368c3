from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

import flashnorm
from flashnorm.verify.perplexity import Perplexity
from flashnorm.verify.render import report_tables
from flashnorm.verify.report import Check, VerifyReport
from tests.verify.faults import folded_twice
from tests.verify.tiny import folded, tiny_model


@pytest.fixture(scope="module")
def passed() -> VerifyReport:
    source = tiny_model("llama")
    return flashnorm.verify(source, folded(source), new_tokens=8)


@pytest.fixture(scope="module")
def failed() -> VerifyReport:
    source = tiny_model("llama")
    return flashnorm.verify(source, folded_twice(source), new_tokens=8)


def _printed(report: VerifyReport) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(report_tables(report))
    return console.file.getvalue()


@pytest.mark.parametrize(("value", "verdict"), [(1.0, True), (1.1, False), (math.nan, False), (math.inf, False)])
def test_a_check_passes_up_to_its_bound(value: float, verdict: bool) -> None:
    assert Check("x", value, 1.0, "").passed is verdict


def test_the_json_form(passed: VerifyReport, failed: VerifyReport) -> None:
    table = json.loads(json.dumps(passed.to_dict(), allow_nan=False))
    assert table["passed"] is True
    assert set(table) == {
        *("reference", "candidate", "dtype", "text_dtype", "oracle_dtype", "samples", "logits", "perplexity"),
        *("greedy", "checks", "notes", "not_compared", "tasks", "passed"),
    }
    assert table["logits"]["positions"] == 256
    assert table["checks"][1].keys() == {"name", "value", "bound", "meaning", "passed"}
    assert len(table["greedy"]) == 4
    assert failed.to_dict()["passed"] is False


def test_the_json_form_becomes_the_report_again(passed: VerifyReport, failed: VerifyReport) -> None:
    broken = dataclasses.replace(failed, checks=(Check("x", math.inf, -math.inf, ""),))
    empty = dataclasses.replace(passed, logits=None, perplexity=None, greedy=(), notes=("nan",))
    text = dataclasses.replace(passed, perplexity=Perplexity(1.0, 2.0, 1.0, 3))
    for report in (passed, failed, broken, empty, text):
        assert VerifyReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    [check] = VerifyReport.from_dict(
        dataclasses.replace(passed, checks=(Check("x", math.nan, 1, ""),)).to_dict()
    ).checks
    assert math.isnan(check.value)


def test_figures_that_json_has_no_number_for(passed: VerifyReport) -> None:
    broken = dataclasses.replace(passed, checks=(Check("x", math.inf, math.nan, ""),))
    assert broken.to_dict()["checks"][0] == {
        "name": "x",
        "value": "inf",
        "bound": "nan",
        "meaning": "",
        "passed": False,
    }


def test_the_tables_show_every_figure_and_check(passed: VerifyReport, failed: VerifyReport) -> None:
    text = _printed(dataclasses.replace(passed, notes=("something to know",)))
    for expected in (
        "relative error of the logits",
        "KL divergence",
        "top-1",
        "(the same 8 tokens)",
        "something to know",
    ):
        assert expected in text
    assert all(check.name in text for check in passed.checks)
    assert "FAILED" not in text
    assert "FAILED" in _printed(failed)


def test_a_difference_is_shown_with_its_margins(failed: VerifyReport) -> None:
    difference = next(pair.difference for pair in failed.greedy if pair.difference)
    text = " ".join(_printed(failed).split())
    assert f"differs from token {difference.position}" in text
    assert f"{difference.reference_margin:.3g}" in text


def test_the_verdict_is_one_sentence(passed: VerifyReport, failed: VerifyReport) -> None:
    """It names what else failed; four sentences that say the same are no clearer than one."""
    assert passed.verdict == "passed: 6 checks; the candidate computes what the reference computes"
    assert "it does not compute the same function (failed as well: exact_drift_ratio, " in failed.verdict
    assert len(failed.verdict) < 400
    assert str(passed) == f"LlamaForCausalLM, compared with LlamaForCausalLM: {passed.verdict}"


def test_only_a_failed_check_says_what_it_means(passed: VerifyReport, failed: VerifyReport) -> None:
    assert {check["meaning"] for check in passed.to_dict()["checks"]} == {""}
    for check in failed.to_dict()["checks"]:
        assert bool(check["meaning"]) is not check["passed"]
