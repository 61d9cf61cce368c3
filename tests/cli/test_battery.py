from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashnorm.cli.main import main
from tests.verify.endpoint import server
from tests.verify.tiny import save, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("battery") / "model")


def _run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *map(str, arguments)])
    return int(stop.value.code or 0)


def test_a_sound_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--junit", tmp_path / "a.xml", "--html", tmp_path / "a.html")
    assert _run("--model", folder, "--level", "quick", "--only", "lag,causality", *files) == 0
    out, err = capsys.readouterr()
    assert "passed: 2 checks (causality, lag)" in out
    assert "verify: causality" in err
    assert ElementTree.parse(tmp_path / "a.xml").getroot()[0].get("failures") == "0"
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")


def test_a_failure_in_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashnorm.verify import suite
    from tests.faults.decoding import answers_late

    engine = suite.model_engine
    monkeypatch.setattr(suite, "model_engine", lambda *given: answers_late(engine(*given)))
    assert _run("--model", folder, "--level", "quick", "--only", "lag", "--json", "--quiet") == 1
    out, err = capsys.readouterr()
    table = json.loads(out)
    assert table["passed"] is False
    assert table["checks"][0]["name"] == "lag"
    assert table["checks"][0]["meaning"] in err
    assert err.startswith("flashnorm: lag: ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "absent"), "absent does not exist; give a checkpoint folder"),
        (("--model", "model", "model"), "--model takes one checkpoint"),
        (("--model", "model", "--only", "luck"), "there is no check 'luck'"),
        (("--model", "model", "--only", "slots"), "nothing was checked: "),
        (("--model", "model", "--device", "cuda:77"), "--device cuda:77 cannot be used here"),
        (("--model", "model", "--html", "absent/a.html"), "cannot be written: give the path of a file in a folder"),
        (("--model", "model", "--junit", "model"), "cannot be written"),
        (("model", "model", "--only", "lag"), "belong to the battery; give --model DIR"),
    ],
)
def test_refusals(folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str) -> None:
    paths = ("absent", "model", "absent/a.html")
    assert _run(*(folder.parent / a if a in paths else a for a in arguments), "--quiet") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err


def test_an_endpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server.serving(server.completions(server.sure(tiny_model("llama")))) as url:
        options = ("--endpoint", url, "--model", "tiny", "--reference", folder, "--level", "quick")
        assert _run(*options, "--only", "determinism", "--quiet") == 0
        assert "passed: 1 checks (determinism)" in capsys.readouterr().out
        with server.serving(server.proxy(url, server.other_every_time)) as bad:
            options = ("--endpoint", bad, "--model", "tiny", "--reference", folder, "--level", "quick")
            assert _run(*options, "--only", "determinism", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["checks"][0]["passed"] is False
    assert "determinism: repeated, the log-probabilities at step" in err
    assert _run("--endpoint", "http://127.0.0.1:9/v1") == 2
    assert "give --model NAME" in capsys.readouterr().err
