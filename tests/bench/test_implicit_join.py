"""The measure of an implicit join, on the host: what it asks of each form, and what a fault and none look like."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import implicit_join, small_decoder, two_stream_text
from benchmarks.implicit_join import FORMS, SIZES, Form, as_promised, measure, race_runs, sanitized, unit_tests
from benchmarks.small_decoder import Source, evenly, new_decoder, standard_library, train
from benchmarks.two_stream_text import CAPTURED, EAGER, LOADED, Extent, compared
from flashnorm.bench.record import provenance
from flashnorm.errors import Refusal
from flashnorm.kernels import reference
from flashnorm.verify.perplexity import token_losses
from flashnorm.verify.races.capture import NotCaptured
from tests.bench.two_streams_on_host import late, sound
from tests.faults.two_streams import FAULTS, BothJoinedAfterwards, ImplicitJoin, TwoStreams
from tests.verify import host_graphs
from tools.implicit_join_table import implicit_join as tabulated

CPU = torch.device("cpu")
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2}
SMALL = Extent(seconds=60, most=3, windows=(2, 24), prompts=(1, 8), written=8, steps=20, loaded=2)
REPORT = """CSAN detected a possible data race on tensor with data pointer 7
Access by stream 0 during kernel:
aten::mul.Tensor(Tensor self, Tensor other) -> Tensor
AccessType.READ argument(s) other
With stack trace:
  File "/home/somebody/flashnorm/tests/faults/two_streams.py", line 40, in __call__
    result = (product * self._scale).to(x.dtype)

Previous access by stream 93 during kernel:
aten::copy_(Tensor(a!) self, Tensor src) -> Tensor(a!)
AccessType.WRITE argument(s) self, and to the output
With stack trace:
  File "/home/somebody/flashnorm/tests/faults/two_streams.py", line 36, in __call__
    self._scale.copy_(scale)

Tensor was allocated with stack trace:
  File "<frozen runpy>", line 198, in _run_module_as_main"""


def _source() -> Source:
    return standard_library(Path(implicit_join.__file__).parent)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a whole run with tiny sizes, on forms that are right on the host but for the last one."""
    path = tmp_path_factory.mktemp("record") / "record.json"
    forms = [dataclasses.replace(form, make=sound(form.make)) for form in FORMS]
    forms[-1] = dataclasses.replace(forms[-1], make=late(BothJoinedAfterwards))
    with pytest.MonkeyPatch.context() as patch:
        host_graphs.install(patch)
        patch.setattr(implicit_join, "FORMS", tuple(forms))
        patch.setattr(implicit_join, "SOUND", forms[0])
        patch.setattr(implicit_join, "SIZES", ((1, 16, 8), (3, 16, 8)))
        patch.setattr(implicit_join, "RACED", (4, 48, 32))
        patch.setattr(implicit_join, "standard_library", _source)
        patch.setattr(implicit_join, "sanitizer_findings", lambda target: "" if "sound" in target else REPORT)
        patch.setattr(small_decoder, "_SIZES", TINY)
        result = measure(path, CPU, 2, provenance(CPU, "a command", "0123456789abcdef"), SMALL)
    assert json.loads(path.read_text()) == result
    return result


def test_every_form_goes_through_everything(table: dict[str, Any]) -> None:
    assert [form["name"] for form in table["forms"]] == [form.name for form in FORMS]
    assert table["complete"] is True
    assert table["model"]["training"]["steps"] == 3
    for form, asked in zip(table["forms"], FORMS, strict=True):
        assert [len(form["races"]["runs"]), len(form["unit_tests"])] == [2, 4]
        assert form["perplexity"]["tokens"] == 2 * 23
        assert [row["steps"] for row in form["decoding"]] == [EAGER, *([LOADED] if asked.loaded else []), CAPTURED]
        for row in form["decoding"]:
            fewer = 2 if row["steps"] == LOADED else 1
            assert (row["lag"]["steps"], row["text"]["tokens"]) == (20 // fewer - 7, 8 // fewer)


def test_the_page_can_show_it(table: dict[str, Any]) -> None:
    text = tabulated(table)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    ways = sum(len(form["decoding"]) for form in table["forms"])
    assert len(rows) == 2 * 2 + len(FORMS) + ways  # two tables, each with a title and a rule
    assert text.count("The sanitizer on") == 3
    assert "Text of both joins after the result" in text


def test_faults_are_accused_and_the_sound_form_is_not(table: dict[str, Any]) -> None:
    right, *faults = table["forms"]
    assert [run["by"] for run in right["races"]["runs"]] == [[], []]
    assert [run["by"] for form in faults for run in form["races"]["runs"]] == [["clocks"]] * 6
    assert all("are not ordered" in form["races"]["meaning"] for form in faults)
    assert as_promised(table)
    for form in (right, faults[0]):
        turned = json.loads(json.dumps(table))
        next(f for f in turned["forms"] if f["name"] == form["name"])["races"]["runs"][0]["caught"] ^= True
        assert not as_promised(turned)


def test_a_late_form_shows_in_decoded_text_and_not_in_what_is_read(table: dict[str, Any]) -> None:
    *fine, stale = table["forms"]
    for form in fine:
        assert form["perplexity"]["relative_difference"] == 0
        assert all(row["lag"]["passed"] for row in form["decoding"])
        assert all(same == row["text"]["tokens"] for row in form["decoding"] for same in row["text"]["same"])
    assert stale["perplexity"]["relative_difference"] == 0
    for row in stale["decoding"]:
        assert not row["lag"]["passed"]
        assert row["lag"]["figures"].keys() == {"stale_steps", "cached_distance"}


def test_the_sanitizers_words_are_kept_without_folders(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right, fault, *_ = table["forms"]
    assert right["sanitizer"] == {"finding": "", "refused": ""}
    assert fault["sanitizer"]["finding"] == REPORT.replace("/home/somebody/flashnorm/tests/", "")

    def refuse(target: str) -> str:
        raise Refusal(f"{target} could not be run")

    monkeypatch.setattr(implicit_join, "sanitizer_findings", refuse)
    assert sanitized(FORMS[0]) == {"finding": None, "refused": f"{FORMS[0].target} could not be run"}


def test_what_the_sanitizer_runs_exists_for_every_form() -> None:
    for form in FORMS:
        module, name = form.target.split(":")
        assert getattr(importlib.import_module(module), name).args == (form.make,)


def test_the_forms_are_planted_faults_of_the_battery_but_for_the_sound_one() -> None:
    assert [form.make for form in FORMS if form.sound] == [TwoStreams]
    assert {form.make for form in FORMS if not form.sound} <= set(FAULTS.values())
    assert FORMS[1] == Form("implicit join", ImplicitJoin, runs=100, loaded=True)


def test_a_run_that_is_right_by_the_clocks_is_no_catch() -> None:
    runs = race_runs(sound(TwoStreams), 2, CPU)
    assert [run["caught"] for run in runs["runs"]] == [False, False]
    assert runs["meaning"] == ""
    assert all(run["seconds"] > 0 for run in runs["runs"])


def test_a_unit_test_fails_what_is_wrong_at_once() -> None:
    def unscaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return 1.1 * reference.rms_linear(x, weight, eps)

    sizes = [size for size in SIZES if size[1] == 576 and size[0] <= 64]
    assert len(sizes) == 6
    assert all(row["passed"] for row in unit_tests(lambda: reference.rms_linear, CPU, sizes))
    assert not any(row["passed"] for row in unit_tests(lambda: unscaled, CPU, sizes))


def test_a_refused_capture_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        device = CPU

        def lag(self, begin: Any, fewer: int) -> None:
            raise NotCaptured(904, "unjoined work")

    row = two_stream_text._written(Refusing(), CAPTURED, lambda rows: None, torch.zeros(1, 1))  # type: ignore[arg-type]
    assert row["steps"] == CAPTURED
    assert "is never joined" in row["refused"]


def test_texts_are_compared_up_to_their_first_difference() -> None:
    text, wanted = torch.tensor([list(b"abab"), list(b"abcd")]), torch.tensor([list(b"abcd"), list(b"abcd")])
    found = compared(text, wanted)
    assert (found["tokens"], found["same"]) == (4, [2, 4])
    assert (found["repeats"], found["repeats_wanted"]) == (0.25, 0.0)
    assert (found["first"], found["first_wanted"]) == ("abab", "abcd")


def test_training_lowers_the_perplexity_of_text_that_is_held_out() -> None:
    source = _source()
    model = new_decoder(CPU, **TINY)
    windows = evenly(source.held_out, 4, 64)
    before = token_losses(model, windows, 1).mean()
    done = train(model, source.read, 60, rows=8, length=64, most=30)
    after = token_losses(model, windows, 1).mean()
    assert done.steps == 30
    assert before == pytest.approx(torch.tensor(256.0).log().item(), rel=0.02)  # it knows nothing
    assert after < before - 0.5
    assert not model.training


def test_training_stops_in_time_and_text_is_what_is_there(tmp_path: Path) -> None:
    model, source = new_decoder(CPU, **TINY), _source()
    assert train(model, source.read, 1e-3, rows=1, length=8).steps == 1
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("no")
    with pytest.raises(SystemExit, match="holds no Python sources"):
        standard_library(tmp_path)
    (tmp_path / "b.py").write_bytes(b"b" * 50)
    (tmp_path / "a.py").write_bytes(b"a" * 50)
    text = standard_library(tmp_path)
    assert bytes(text.read.tolist()) == b"a" * 50 + b"b" * 48
    assert bytes(text.held_out.tolist()) == b"bb"
    with pytest.raises(SystemExit, match="fewer than 2 windows of 2"):
        evenly(text.held_out, 2, 2)


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["implicit_join", "--record", str(tmp_path / "record.json")])
    with pytest.raises(SystemExit, match="nothing was measured"):
        implicit_join.main()
    assert list(tmp_path.iterdir()) == []
