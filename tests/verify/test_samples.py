from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedConfig

from flashnorm.errors import Refusal
from flashnorm.verify.samples import EXCERPT, PROMPT, PROMPTS, Samples, make_samples
from flashnorm.verify.subject import Subject, open_subject
from tests.verify.tiny import VOCABULARY, save, tiny_model

TEXT = " ".join(map(str, range(1000)))  # 3889 characters, so as many tokens


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return open_subject(save(tiny_model("llama"), tmp_path_factory.mktemp("samples") / "llama"))


def _same(ours: Samples, theirs: Samples) -> bool:
    return ours.excerpts.equal(theirs.excerpts) and ours.prompts.equal(theirs.prompts)


def test_the_built_in_passages(subject: Subject) -> None:
    samples = make_samples(subject, None, 256, 4096)
    assert samples.excerpts.shape == (4, EXCERPT)
    assert samples.prompts.shape == (PROMPTS, PROMPT)
    assert samples.windows is None
    assert subject.decode(samples.prompts[0].tolist()) == "The river rises "
    assert _same(samples, make_samples(subject, None, 256, 4096))


def test_a_text_from_a_quarter_on(subject: Subject) -> None:
    samples = make_samples(subject, TEXT, 256, 600)
    assert samples.windows.shape == (2, 256)  # half of the model's 512 positions each
    assert subject.decode(samples.windows.flatten().tolist()) == TEXT[len(TEXT) // 4 :][:512]
    assert samples.prefix == 1
    assert all(subject.decode(excerpt.tolist()) in TEXT for excerpt in samples.excerpts)


def test_a_short_text_gives_what_it_has(subject: Subject) -> None:
    samples = make_samples(subject, TEXT[:100], 256, 4096)
    assert samples.windows.shape == (1, 75)
    assert samples.excerpts.shape == (1, EXCERPT)
    assert make_samples(subject, TEXT, 256, 100).windows.shape == (1, 100)
    with pytest.raises(Refusal, match="has only 80 characters"):
        make_samples(subject, TEXT[:80], 256, 4096)


def test_what_the_tokenizer_puts_first_comes_before_each_window(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path / "llama")
    subject = open_subject(folder)
    template = processors.TemplateProcessing(single="! $A", special_tokens=[("!", 0)])
    subject.tokenizer.bos_token = "!"
    subject.tokenizer.backend_tokenizer.post_processor = template
    samples = make_samples(subject, TEXT, 256, 600)
    assert samples.windows.shape == (2, 256)
    assert (samples.windows[:, 0] == 0).all()
    assert samples.prefix == 1
    assert subject.decode(samples.windows[0, 1:].tolist()) == TEXT[len(TEXT) // 4 :][:255]


def test_random_ids_without_a_tokenizer() -> None:
    model = tiny_model("llama")
    model.config.eos_token_id = 5
    subject = open_subject(model)
    samples = make_samples(subject, None, 2560, 4096)
    assert samples.excerpts.shape == (40, EXCERPT)
    assert set(range(VOCABULARY)) - set(samples.excerpts.flatten().tolist()) == {5}
    assert _same(samples, make_samples(subject, None, 2560, 4096))
    assert subject.decode([3, 4]) == "3 4"
    with pytest.raises(Refusal, match="has no tokenizer"):
        make_samples(subject, TEXT, 256, 4096)
    with pytest.raises(Refusal, match="neither a tokenizer nor a vocabulary size"):
        make_samples(dataclasses.replace(subject, config=PreTrainedConfig()), None, 256, 4096)


def test_a_model_with_few_positions_gets_short_samples() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 16
    samples = make_samples(open_subject(model), None, 64, 4096)
    assert samples.excerpts.shape == (8, 8)
    assert samples.prompts.shape == (PROMPTS, 8)
    assert samples.excerpts.dtype == torch.int64


def _with_positions(folder: Path, positions: int, prefix: int) -> Subject:
    subject = open_subject(save(tiny_model("llama"), folder))
    subject.config.max_position_embeddings = positions
    if prefix:
        subject.tokenizer.bos_token = "!"
        template = processors.TemplateProcessing(single="! " * prefix + "$A", special_tokens=[("!", 0)])
        subject.tokenizer.backend_tokenizer.post_processor = template
    return subject


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("positions", range(2, 9))
def test_a_text_fits_the_positions_or_is_refused(tmp_path: Path, positions: int, prefix: int) -> None:
    subject = _with_positions(tmp_path / "llama", positions, prefix)
    if positions // 2 - prefix < max(1, 2 - prefix):
        with pytest.raises(Refusal, match="leave the text out"):
            make_samples(subject, TEXT, 8, 8)
        return
    samples = make_samples(subject, TEXT, 8, 8)
    assert samples.prefix < samples.windows.shape[1] <= positions // 2
