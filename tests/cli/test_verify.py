from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import flashnorm
from flashnorm.cli.main import main
from tests.verify.faults import value_projection_missed
from tests.verify.tiny import folded, save, tiny_model

FAST = ("--positions", "64", "--new-tokens", "4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("verify")
    source = tiny_model("llama")
    models = {"source": source, "folded": folded(source), "wrong": value_projection_missed(source)}
    return {name: save(model, root / name) for name, model in models.items()}


def _run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *map(str, arguments)])
    return int(stop.value.code or 0)


def test_a_correct_fold(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folders["source"], folders["folded"], *FAST) == 0
    out, err = capsys.readouterr()
    assert "passed: 6 checks" in out
    assert "samples: built-in passages" in out
    assert "verify: " in err
    assert "logits in float64" in err
    assert err.count("s left)") == 4  # the candidate's steps: loading, both kinds of logits, greedy text
    assert "note: no perplexity: it is taken of a text of yours, which --text FILE gives" in out


def test_a_wrong_fold(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folders["source"], folders["wrong"], *FAST, "--quiet") == 1
    out, err = capsys.readouterr()
    assert "FAILED" in out
    assert "passed: " not in out
    assert err.startswith(f"flashnorm: {folders['wrong']} is not {folders['source']} folded: ")


@pytest.mark.parametrize(("name", "status"), [("folded", 0), ("wrong", 1)])
def test_json(folders: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str, status: int) -> None:
    text = folders["source"] / "text.txt"
    text.write_text("one two three four " * 60)
    options = ("--text", text, "--tokens", "256", "--dtype", "bfloat16")
    assert _run(folders["source"], folders[name], *FAST, *options, "--json") == status
    table = json.loads(capsys.readouterr().out)
    assert table["passed"] is (status == 0)
    assert table["dtype"] == "bfloat16"
    assert table["perplexity"]["tokens"] == 255


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "verify takes the source and the folded folder"),
        (("source",), "verify takes the source and the folded folder"),
        (("absent", "folded"), "absent does not exist; give a checkpoint folder"),
        (
            ("source", "folded", "--text", "absent.txt"),
            "absent.txt cannot be read: No such file or directory; give --text",
        ),
        (("source", "folded", "--text", "source/model.safetensors"), "is not UTF-8 text"),
        (("source", "--hashes", "folded"), "leave out SRC and DST"),
        (("--hashes", "folded"), "has no flashnorm.json"),
    ],
)
def test_refusals(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    root = folders["source"].parent
    assert _run(*(a if a.startswith("-") else root / a for a in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err


def test_hashes(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flashnorm.fold_checkpoint(folders["source"], tmp_path / "out", quiet=True)
    assert _run("--hashes", tmp_path / "out", "--json", "--quiet") == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out" / "stray").touch()
    assert _run("--hashes", tmp_path / "out", "--quiet") == 1
    out, err = capsys.readouterr()
    assert "changed: model.safetensors" in out
    assert "extra: stray" in out
    assert "is not as it was written: 1 file changed, 0 missing, 1 extra" in err
