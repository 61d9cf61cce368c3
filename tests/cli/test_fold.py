"""`flashnorm fold`: output, JSON and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import flashnorm
from flashnorm.checkpoint.manifest import read_manifest
from flashnorm.cli.fold import by_reason
from flashnorm.cli.main import main
from tests.checkpoint.dyt import PAGE, write_dyt
from tests.checkpoint.test_fold import SMALL, saved


def _status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["fold", *map(str, arguments)])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("fold"), LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)))


def test_it_says_what_it_did(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(source, tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"folded 4 norms into {tmp_path / 'out'}"
    assert out.splitlines()[1].startswith("left alone: model.norm: its reader lm_head.weight is tied")
    assert err.startswith(f"fold: opening {source}\n")
    assert "100%" in err or " of " in err


def test_the_untied_head_is_said(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(source, tmp_path / "out", "--untie", "--quiet") == 0
    out, err = capsys.readouterr()
    assert "folded 5 norms" in out
    assert "the untied head adds 0.0 MB" in out
    assert err == ""


def test_json(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(source, tmp_path / "out", "--json", "--quiet") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["source"], report["out"], report["already_folded"]) == (str(source), str(tmp_path / "out"), False)
    assert len(report["folded"]) == 4
    assert list(report["skipped"]) == ["model.norm"]


MODES: list[tuple[str, ...]] = [(), ("--strict",), ("--untie",), ("--strict", "--untie")]


@pytest.mark.parametrize("asked", MODES, ids=" ".join)
@pytest.mark.parametrize("given", MODES, ids=" ".join)
def test_folded_already_is_an_answer_only_to_who_asked_for_that(
    given: tuple[str, ...], asked: tuple[str, ...], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folded, out = tmp_path / "folded", tmp_path / "out"
    assert _status(source, folded, "--quiet", *given) == 0
    has = read_manifest(folded)
    capsys.readouterr()
    same = (has.mode == "strict") == ("--strict" in asked) and (has.untied or "--untie" not in asked)
    assert _status(folded, out, "--quiet", *asked) == (0 if same else 2)
    assert not out.exists()
    printed = capsys.readouterr()
    assert (f"nothing was done, {out} was not made" in printed.out) == same
    assert ("`flashnorm unfold` it, then fold it" in printed.err) == (not same)


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(tmp_path / "nothing", tmp_path / "out", "--quiet") == 2
    error = capsys.readouterr().err
    assert error.startswith("flashnorm: ")
    assert error.count("\n") == 1


def test_reports_are_one_line_as_text(source: Path, tmp_path: Path) -> None:
    assert str(flashnorm.audit(source)) == "llama: 4 of 5 norms can be folded"
    assert str(flashnorm.fold_checkpoint(source, tmp_path / "out")) == "4 norms folded, 1 left alone"
    assert str(flashnorm.fold_checkpoint(tmp_path / "out", tmp_path / "x")) == "4 norms folded already, 1 left alone"


def test_norms_of_all_layers_are_one_line() -> None:
    skipped = {
        "layers.0.norm": "layers.0.post adds it",
        "layers.1.norm": "layers.1.post adds it",
        "layers.2.other": "layers.2.x reads it",
    }
    assert by_reason(skipped) == [
        "layers.0.norm and 1 like it: layers.*.post adds it",
        "layers.2.other: layers.2.x reads it",
    ]
    assert by_reason({}) == []


@pytest.mark.usefixtures("own_code")
def test_the_page_on_dyt_shows_what_the_commands_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dyt(tmp_path / "my-model")
    console = PAGE.partition("```console\n$ ")[2].partition("\n```")[0]
    for command, *shown in (part.splitlines() for part in console.split("\n$ ")):
        with pytest.raises(SystemExit) as stopped:
            main([*command.split()[1:], "--quiet"])
        assert stopped.value.code in (None, 0), command
        printed = capsys.readouterr().out.splitlines()
        assert printed[-len(shown) :] == shown, command


@pytest.mark.usefixtures("own_code")
def test_json_names_new_biases_and_who_keeps_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_dyt(tmp_path / "source")
    options = ("--add-bias", "--trust-remote-code", "--json", "--quiet")
    assert _status(source, tmp_path / "out", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["new_biases"]) == 14
    assert report["keeps_bias"] == ["model.norm"]
    assert _status(tmp_path / "out", tmp_path / "again", *options) == 0
    assert json.loads(capsys.readouterr().out)["new_biases"] == report["new_biases"]


@pytest.mark.usefixtures("own_code")
def test_biases_without_a_place_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(source, tmp_path / "out", "--add-bias", "--quiet") == 2
    assert capsys.readouterr().err.startswith(f"flashnorm: {source} has no norm whose bias lacks a home")
    assert not (tmp_path / "out").exists()
