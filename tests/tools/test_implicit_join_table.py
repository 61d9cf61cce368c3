"""The tables of an implicit join's record; and, once there is one, what it must say."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tools.battery_tables import JOINS
from tools.implicit_join_table import implicit_join
from tools.tables import RECORDS, read

FINDING = """CSAN detected a possible data race on tensor with data pointer 7
Access by stream 0 during kernel:
aten::mul.Tensor(Tensor self, Tensor other) -> Tensor
With stack trace:
  File "faults/two_streams.py", line 40, in __call__
    result = product * self._scale

Previous access by stream 93 during kernel:
Tensor was allocated with stack trace:
  File "<frozen runpy>", line 198, in _run_module_as_main"""


def _form(name: str, caught: bool, **more: Any) -> dict[str, Any]:
    text = {"tokens": 20, "same": [20, 20], "repeats": 0.1, "repeats_wanted": 0.1}
    text |= {"first": "import os", "first_wanted": "import os"}
    lag = {"passed": True, "meaning": "", "steps": 153, "figures": {}}
    run = {"caught": caught, "by": ["clocks", "delays"] if caught else [], "seconds": 0.25}
    return {
        "name": name,
        "sound": not caught,
        "races": {"runs": [run, {**run, "seconds": 0.5}], "meaning": "is not ordered" if caught else ""},
        "sanitizer": {"finding": FINDING if caught else "", "refused": ""},
        "unit_tests": [{"size": [1, 2, 3], "dtype": "bfloat16", "passed": True}] * 3,
        "perplexity": {"reference": 2.5, "candidate": 2.5, "relative_difference": 0.0, "tokens": 100},
        "decoding": [{"steps": "captured", "refused": "", "lag": lag, "text": text}],
        **more,
    }


def _record() -> dict[str, Any]:
    late = _form("late", caught=True)
    late["decoding"][0]["lag"] |= {"passed": False, "meaning": "the logits | of 1 step before"}
    late["decoding"][0]["text"] |= {"same": [3, 0], "repeats": 0.5, "first": "im im\n`", "first_wanted": "import os"}
    refused = [{"steps": "captured", "refused": "a stream is never joined"}]
    training = {"steps": 900, "seconds": 20.0, "loss": 0.9}
    text = {"bytes": 30_000_000, "held_out": 600_000, "sha256": "0"}
    model = {"hidden_size": 512, "num_hidden_layers": 4, "parameters": 13_100_000, "untrained_perplexity": 256.4}
    source = {"device": "a GPU", "driver": None, "packages": {"torch": "2"}, "command": "a command"}
    return {
        "complete": True,
        "provenance": source | {"commit": "0123456789abcdef", "date": "2026-12-01T00:00:00"},
        "model": model | {"text": text, "training": training},
        "forms": [_form("sound", caught=False), _form("never", caught=True, decoding=refused), late],
    }


def test_each_form_has_a_line_and_each_way_to_decode_one() -> None:
    text = implicit_join(_record())
    assert "| sound | 0 of 2 | clocks (0), delays (0), graph (0) | 0.50 | says nothing | 3 of 3 | +0.00% |" in text
    assert "| never | 2 of 2 | clocks (2), delays (2), graph (0) | 0.50 | accuses | 3 of 3 | +0.00% |" in text
    assert "| sound | captured | passes, 153 steps | 20, 20, of 20 | 10%, 10% |" in text
    assert "| never | captured | none: a stream is never joined |  |  |" in text
    assert r"| late | captured | the logits \| of 1 step before | 3, 0, of 20 | 50%, 10% |" in text
    assert "perplexity of a held-out byte 2.5, untrained 256.4" in text
    assert "a GPU, torch 2; `a command` at 0123456789ab" in text
    assert "not complete" not in text


def test_what_the_sanitizer_says_and_what_was_written_is_quoted() -> None:
    text = implicit_join(_record())
    lines = [line for line in FINDING.splitlines()[:7] if line and not line.startswith((" ", "With"))]
    lines.append("Previous access by stream 93 during kernel:")
    assert text.count("\n".join(["The sanitizer on never:", "", "```", *lines, "```", ""])) == 1
    assert "The sanitizer on sound" not in text
    assert "Text of late, captured, and of the sound form:\n\n```\n'im im\\n`'\n'import os'\n```\n" in text
    assert text.count("Text of") == 1


def test_what_is_wrong_or_missing_is_shown_as_such() -> None:
    record = copy.deepcopy(_record())
    record["complete"] = False
    record["forms"][0]["sanitizer"] = {"finding": None, "refused": "no device"}
    record["forms"][1]["perplexity"]["relative_difference"] = "nan"
    record["forms"][2]["perplexity"]["relative_difference"] = 0.021
    record["forms"][2]["unit_tests"] = [*record["forms"][2]["unit_tests"], {"passed": False}]
    text = implicit_join(record)
    assert "The record is not complete." in text
    assert "| could not run | 3 of 3 | +0.00% |" in text
    assert "| accuses | 3 of 3 | nan |" in text
    assert "| accuses | 3 of 4 | +2.10% |" in text


def test_the_record_shows_that_the_join_is_caught_and_that_unit_tests_and_perplexity_miss_it() -> None:
    path = RECORDS / f"{JOINS}.json"
    if not path.exists():
        pytest.skip("not measured yet: python -m benchmarks.implicit_join needs a CUDA GPU")
    record = read(path)
    assert record["complete"]
    sound, join, *_ = record["forms"]
    assert (sound["name"], join["name"]) == ("sound", "implicit join")
    for form in record["forms"]:
        assert {run["caught"] for run in form["races"]["runs"]} == {not form["sound"]}
        assert max(run["seconds"] for run in form["races"]["runs"]) < 10
    assert [len(form["races"]["runs"]) for form in (sound, join)] == [100, 100]
    assert all("delays" in run["by"] for run in join["races"]["runs"])
    assert all(test["passed"] for form in (sound, join) for test in form["unit_tests"])
    assert abs(join["perplexity"]["relative_difference"]) < 0.01
    assert join["perplexity"]["reference"] < record["model"]["untrained_perplexity"] / 10
    assert sound["sanitizer"] == {"finding": "", "refused": ""}
    assert "data race" in join["sanitizer"]["finding"]
    assert all(row["lag"]["passed"] for row in sound["decoding"])
    captured = [row for form in record["forms"] if not form["sound"] for row in form["decoding"] if "lag" in row]
    assert any(not row["lag"]["passed"] for row in captured if row["steps"] == "captured")
