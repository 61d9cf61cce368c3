from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import flashnorm
from flashnorm.cli.generate import _figures, _sentence
from flashnorm.cli.main import main
from flashnorm.errors import Unsupported
from flashnorm.runtime.generate_text import GeneratedText
from tests.verify.tiny import save, tiny_model, tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
WORDS = tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tiny_model("llama"), tmp_path_factory.mktemp("generate") / "chat", with_tokenizer=False)
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    return folder


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["generate", *map(str, arguments)])
    return int(stop.value.code or 0)


def expected(text: str, tokens: int = 8) -> str:
    ids = WORDS(text, return_tensors="pt")["input_ids"]
    new = tiny_model("llama").generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return str(WORDS.decode(new, skip_special_tokens=True))


def table(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert run(*arguments, "--json", "--quiet", "--max-new-tokens", "8") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_text_on_stdout_and_figures_on_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--prompt", "Hello", "--max-new-tokens", "8", "--device", "cpu") == 0
    out, err = capsys.readouterr()
    assert out == expected("Hello") + "\n"
    lines = err.splitlines()
    assert lines[0] == f"generate: opening {folder}"
    assert "generate: on cpu the stock path of Transformers runs; acceleration needs a CUDA GPU" in lines
    assert lines[-1].startswith("generate: 8 tokens, first token after 0.")
    assert lines[-1].endswith(" tokens/s")


def test_the_pieces_are_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("flashnorm.cli.generate._print", pieces.append)
    assert run(folder, "--prompt", "Hello", "--max-new-tokens", "8", "--quiet") == 0
    assert "".join(pieces) == expected("Hello")


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = table(capsys, folder, "--prompt", "Hello", "--dtype", "float32", "--device", "cpu")
    assert answer["text"] == expected("Hello")
    assert (answer["prompt_tokens"], answer["new_tokens"]) == (5, 8)
    assert answer["first_token_s"] > 0
    assert answer["tokens_per_s"] > 0
    assert (answer["path"], answer["device"], answer["dtype"]) == ("stock", "cpu", "float32")
    assert answer["percent_of_limit"] is None


def test_a_prompt_from_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    answer = table(capsys, folder, "--prompt-file", tmp_path / "prompt.txt")
    assert answer["text"] == expected("Grüße")


def test_the_chat_template(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table(capsys, chatty, "--prompt", "Hi")["text"] == expected("[Hi]>")
    assert table(capsys, chatty, "--prompt", "Hi", "--chat")["text"] == expected("[Hi]>")
    assert table(capsys, chatty, "--prompt", "Hi", "--raw")["text"] == expected("Hi") != expected("[Hi]>")


@pytest.mark.parametrize("options", [("--temperature", "2"), ("--top-p", "0.9"), ("--top-k", "40")])
def test_seeds(folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str]) -> None:
    texts = [table(capsys, folder, "--prompt", "Hi", *options, "--seed", seed)["text"] for seed in "112"]
    assert texts[0] == texts[1] != texts[2]


def test_temperature_zero_overrides_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama")
    model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
    save(model, tmp_path)
    drawn = table(capsys, tmp_path, "--prompt", "Hi", "--seed", "1")["text"]
    assert table(capsys, tmp_path, "--prompt", "Hi", "--temperature", "0")["text"] == expected("Hi") != drawn


def test_a_strict_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flashnorm.fold_checkpoint(folder, tmp_path / "strict", strict=True, quiet=True)
    assert table(capsys, tmp_path / "strict", "--prompt", "Hello")["text"] == expected("Hello")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give one of the two"),
        (("--prompt", "a", "--prompt-file", "b"), "give one of the two"),
        (("--prompt", ""), "the prompt is empty; give at least one character"),
        (("--prompt-file", "absent.txt"), "absent.txt cannot be read: No such file or directory"),
        (("--prompt", "a", "--max-new-tokens", "-3"), "--max-new-tokens is -3; it must be at least 1"),
        (("--prompt", "a", "--max-new-tokens", "0"), "--max-new-tokens is 0; it must be at least 1"),
        (("--prompt", "a", "--seed", "-1"), "--seed is -1; it must be from 0 to 2**64 - 1"),
        (("--prompt", "a", "--seed", str(2**64)), "it must be from 0 to 2**64 - 1"),
        (
            ("--prompt", "a", "--max-new-tokens", "600"),
            "has 1 token and --max-new-tokens is 600, but the model ",
        ),
        (("--prompt", "a", "--temperature", "-1"), "--temperature is -1.0; it must be 0, or 1e-06 or more"),
        (("--prompt", "a", "--temperature", "nan"), "--temperature is nan; it must be 0, or 1e-06 or more"),
        (("--prompt", "a", "--temperature", "1e-300"), "it must be 0, or 1e-06 or more"),
        (("--prompt", "a\udcff"), "the prompt is not valid text"),
        (("--prompt", "a", "--top-p", "0"), "--top-p is 0.0; it must be above 0 and at most 1"),
        (("--prompt", "a", "--top-k", "0"), "--top-k is 0; it must be at least 1"),
        (("--prompt", "a", "--temperature", "0", "--top-k", "4"), "leaves nothing for --top-p or --top-k to do"),
        (("--prompt", "a", "--device", "toaster"), "--device toaster cannot be used here; give cpu"),
        (("--prompt", "a", "--device", "meta"), "--device meta cannot be used here; give cpu"),
        (("--prompt", "a", "--device", "cuda:99"), "--device cuda:99 cannot be used here; give cpu"),
        (("--prompt", "a", "--chat"), "the tokenizer has no chat template; leave out --chat"),
    ],
)
def test_refusals(folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str) -> None:
    assert run(folder, *arguments, "--quiet") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_folders_that_cannot_be_used(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(sentence: str, path: Path) -> None:
        assert run(path, "--prompt", "a", "--quiet") == 2
        assert sentence in capsys.readouterr().err

    refused("does not exist; give a checkpoint folder", tmp_path / "absent")
    refused("has no tokenizer", save(tiny_model("llama"), tmp_path / "bare", with_tokenizer=False))
    tokenizer().save_pretrained(tmp_path / "words")
    refused("has no config.json", tmp_path / "words")
    weightless = save(tiny_model("llama"), tmp_path / "weightless")
    (weightless / "model.safetensors").unlink()
    refused("cannot be loaded: ", weightless)
    wordy, words = save(tiny_model("llama"), tmp_path / "wordy", with_tokenizer=False), tokenizer()
    words.add_tokens(["<one more>"])
    words.save_pretrained(wordy)
    refused("has 257 tokens and the model has embeddings for 256", wordy)


def test_a_model_that_generates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert run(tmp_path, "--prompt", "a", "--quiet") == 2
    assert "generates no text; give a causal LM" in capsys.readouterr().err


def test_figures_of_one_token_and_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: bytes of weights and cache per token against a measured bandwidth, here of 1 MB/us."""

    class Ceilings:
        bytes_per_us = 1e6

    monkeypatch.setattr("flashnorm.bench.limits.measure_ceilings", lambda device: Ceilings)
    model = tiny_model("llama", torch.bfloat16)
    one = GeneratedText("a", 5, 1, 0.5, 0.5)
    assert _figures(one, model, 10**9)["tokens_per_s"] is None
    assert _sentence(_figures(one, model, 10**9)) == "1 token, first token after 0.500 s"
    many = GeneratedText("a b c", 5, 101, 0.5, 1.5)
    figures = _figures(many, model, 10**9)
    assert figures["bytes_per_token"] == 10**9 + 3 * 2 * 2 * 12 * 2 * 55  # layers, k and v, heads, width, bf16, context
    assert figures["percent_of_limit"] == pytest.approx(100 * 100 * figures["bytes_per_token"] / 1e12)
    assert _sentence(figures) == (
        "101 tokens, first token after 0.500 s, 100.0 tokens/s, 10% of the bandwidth limit "
        "(1.00 GB a token at 1.00 TB/s)"
    )
    assert _figures(many, model, None)["percent_of_limit"] is None


def test_what_runs_on_a_gpu_is_accelerated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of events, with the device's name changed: acceleration comes before the timed run."""
    from flashnorm.cli import generate

    told: list[str] = []
    monkeypatch.setattr(generate, "say", lambda command, step: told.append(step))

    class Pretended:
        device = torch.device("cuda", 0)

    def accelerate(model: Any, **options: Any) -> None:
        assert options == {"max_batch": 1, "max_length": 40}
        report = {"level": 2, "replaced": {"a": ()}, "sites": (1, 2)}
        model.acceleration = type("Report", (), report)

    monkeypatch.setattr(flashnorm, "accelerate", accelerate, raising=False)
    assert generate._accelerated(Pretended(), 40, quiet=False) == "level 2"
    assert told == ["accelerated: level 2, 1 of 2 norms replaced"]

    def refuse(model: Any, **options: Any) -> None:
        raise Unsupported("it is a stone")

    monkeypatch.setattr(flashnorm, "accelerate", refuse)
    assert generate._accelerated(Pretended(), 40, quiet=False) == "stock"
    assert told[1] == "the stock path of Transformers runs, since the model could not be accelerated: it is a stone"


def test_the_coldest_temperature_draws_the_likeliest_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table(capsys, folder, "--prompt", "Hello", "--temperature", "1e-6")["text"] == expected("Hello")


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["stream", "json"])
@pytest.mark.parametrize(("error", "code"), [(errno.EPIPE, 141), (errno.ENOSPC, 2)], ids=["closed pipe", "full disk"])
def test_output_that_cannot_be_written(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Any,
    error: int,
    code: int,
) -> None:
    """Never 1, which means that a check failed; and no traceback."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr("sys.stdout", Broken())
    assert run(folder, "--prompt", "Hello", "--max-new-tokens", "2", "--quiet", *options) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert ("the output cannot be written: No space left on device" in err) == (code == 2)
