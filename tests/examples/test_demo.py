"""The demo on a tiny GGUF: what it leaves, that a second run changes nothing, that an interrupted one goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import demo, table
from examples.demo import Places, main
from tests.checkpoint.gguf_writing import tiny_llama, write_gguf
from tools.readme_example import RECORD

TEXT = "the quick brown fox jumps over the lazy dog. " * 200


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_llama(tie_word_embeddings=True))
    monkeypatch.setattr(demo, "smollm2_gguf", lambda: gguf)
    monkeypatch.setattr(demo, "sotu_text", lambda: TEXT)
    return Places(tmp_path / "demo")


def _state(places: Places) -> dict[str, tuple[int, int]]:
    files = sorted(file for file in places.root.rglob("*") if file.is_file())
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in files}


def test_it_leaves_both_checkpoints_and_shows_one_table(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(places) == 0
    shown = capsys.readouterr().out
    assert "5 norms with a gain, 4 folded" in shown
    assert "perplexity, " in shown
    assert "Left alone: model.norm: " in shown
    assert "The same model: yes" in shown
    assert str(places.folded) in shown
    assert (places.folded / "flashnorm.json").exists()

    before = _state(places)
    assert main(places) == 0
    again = capsys.readouterr()
    assert again.out == shown
    assert again.err.count(" exists: ") == 3
    assert _state(places) == before


def test_an_interrupted_demo_goes_on(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(demo.flashnorm, "verify", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            main(places)
    assert not places.result.exists()
    before = _state(places)
    assert main(places) == 0
    assert before.items() < _state(places).items()


def test_a_failed_verification_is_shown(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(places) == 0
    result = json.loads(places.result.read_text())
    result["verify"]["passed"] = False
    result["verify"]["checks"][0] |= {"passed": False, "value": 2.0, "bound": 1.0, "meaning": "planted"}
    places.result.write_text(json.dumps(result))
    capsys.readouterr()
    assert main(places) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert "planted" in shown
    assert "The same model: NO" in shown


def test_a_result_of_another_version_is_made_again(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(places) == 0
    result = json.loads(places.result.read_text())
    del result["verify"]["logits"]["drift_ratio"]
    places.result.write_text(json.dumps(result))
    assert main(places) == 0
    assert "drift_ratio" in json.loads(places.result.read_text())["verify"]["logits"]


@pytest.mark.parametrize("text", ["[/INST]", "[red]a[0]", "[[", "[link=x]"])
def test_generated_text_is_no_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The chat formats of real models have tags in brackets, which a console may take for markup, and reject."""
    result = json.loads(RECORD.read_text())
    pair = result["verify"]["greedy"][0]
    pair |= {"prompt": f"p{text}", "reference": f"r{text}"}
    result["skipped"] = {f"n{text}": f"s{text}"}
    result["verify"]["checks"][0] |= {"value": 1.0, "meaning": f"m{text}"}
    result["verify"]["notes"] = [f"o{text}"]
    table.show(result, Path("folded"))
    shown = capsys.readouterr().out
    assert all(letter + text in shown for letter in "prnsmo")
