"""Each small model below insists on something beside text; the audit must find it in the signature and the config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from flashnorm.errors import TracingError
from flashnorm.sites.audit import audit
from flashnorm.sites.inputs import main_runs

WIDTH, SIDE, BINS = 8, 4, 5
IMAGE_TOKEN, OWN_WORDS = 29, 7


class Model(nn.Module):
    """Token ids -> embedding -> norm -> head; `config` takes the fields given."""

    def __init__(self, **fields):
        super().__init__()
        self.config = SimpleNamespace(**fields)
        self.embed = nn.Embedding(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def get_input_embeddings(self):
        return self.embed

    def read(self, ids, beside=0.0):
        return {"logits": self.head(self.norm(self.embed(ids) + beside))}


def insist(met: object) -> None:
    if not met:
        raise ValueError("not the inputs of this model")


class Layout(Model):
    def forward(self, input_ids, bbox=None):
        insist(bbox.shape == (*input_ids.shape, 4) and (bbox[..., :2] <= bbox[..., 2:]).all() and bbox.max() <= 1)
        return self.read(input_ids, bbox.mean(-1, keepdim=True))


class Patches(Model):
    def forward(self, flattened_patches=None, decoder_input_ids=None, use_cache=None, **kwargs):
        insist(not kwargs and flattened_patches.shape[-1] == 2 + SIDE and flattened_patches[..., :2].min() == 1)
        return self.read(decoder_input_ids, flattened_patches.mean((1, 2))[:, None, None])


class Sound(Model):
    def forward(self, input_ids, input_features=None):
        rows, tokens = input_ids.shape
        insist(input_features.shape == (rows, BINS, 3 * tokens))
        return self.read(input_ids, input_features.unflatten(2, (tokens, 3)).mean((1, 3))[..., None])


class OneAtATime(Model):
    def forward(self, input_ids):
        insist(len(input_ids) == 1)
        return self.read(input_ids)


class ImageForText(Model):
    def forward(self, pixel_values=None, decoder_input_ids=None, **kwargs):
        insist("input_ids" not in kwargs and pixel_values.shape == (2, 3, SIDE, SIDE))
        return self.read(decoder_input_ids, pixel_values.mean((1, 2, 3))[:, None, None])


class Queries(Model):
    """Three vectors of every image, at placeholders."""

    def forward(self, pixel_values, qformer_input_ids, input_ids=None, decoder_input_ids=None):
        insist(((input_ids == IMAGE_TOKEN).sum(1) == 3).all() and qformer_input_ids.max() < OWN_WORDS)
        insist(decoder_input_ids is not None and pixel_values.ndim == 4)
        return self.read(input_ids, pixel_values.mean())


class Frames(Queries):
    def forward(self, pixel_values, qformer_input_ids, input_ids=None, decoder_input_ids=None):
        insist(pixel_values.shape == (2, 1, 3, SIDE, SIDE))
        return super().forward(pixel_values[:, 0], qformer_input_ids, input_ids, decoder_input_ids)


class Interleaved(Model):
    def forward(self, input_ids, pixel_values=None, image_attention_mask=None):
        insist(pixel_values.shape == (2, 1, 1, SIDE, 2 * SIDE) and image_attention_mask.shape == (*input_ids.shape, 1))
        return self.read(input_ids, pixel_values.mean())


class Places(Model):
    def forward(self, input_ids, pixel_values=None, image_embeds_position_mask=None):
        insist(pixel_values is not None and (image_embeds_position_mask.sum(1) == 11).all())
        embeddings = self.embed(input_ids)
        embeddings[image_embeds_position_mask] = pixel_values.mean()
        return {"logits": self.head(self.norm(embeddings))}


def part(name, **fields):
    """A config with one part called `name`."""
    return {name: SimpleNamespace(**fields), "sub_configs": {name: None}}


QUERIES = {"image_size": SIDE, "num_query_tokens": 3, "qformer_config": SimpleNamespace(vocab_size=OWN_WORDS)}
# What each model's config says.
TOLD = {
    Layout: {},
    OneAtATime: {},
    Patches: part("vision_config", patch_embed_hidden_size=SIDE) | {"is_encoder_decoder": True},
    Sound: part("audio_config", num_mel_bins=BINS) | {"audio_length_per_tok": 3},
    ImageForText: part("encoder", image_size=SIDE) | {"is_encoder_decoder": True},
    Queries: QUERIES | {"image_token_id": IMAGE_TOKEN},
    Frames: QUERIES | {"video_token_id": IMAGE_TOKEN},
    Interleaved: {"image_size": (SIDE, 2 * SIDE), "num_channels": 1},
    Places: {"image_size": SIDE, "latent_query_num": 11},
}


@pytest.mark.parametrize("cls", TOLD)
def test_what_a_model_insists_on_is_made_from_its_signature_and_config(cls):
    (site,) = audit(cls(**TOLD[cls])).sites
    assert site.foldable
    assert [consumer.weight for consumer in site.consumers] == ["head.weight"]


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (Patches, "vision_config"),
        (Sound, "audio_config"),
        (Sound, "audio_length_per_tok"),
        (ImageForText, "encoder"),
        (Queries, "num_query_tokens"),
        (Queries, "image_token_id"),
        (Queries, "qformer_config"),
        (Frames, "video_token_id"),
        (Interleaved, "image_size"),
        (Places, "latent_query_num"),
    ],
)
def test_what_the_config_does_not_tell_is_not_guessed(cls, field):
    fields = {name: value for name, value in TOLD[cls].items() if name != field}
    assert fields != TOLD[cls]
    with pytest.raises(TracingError):
        audit(cls(**fields))


def test_a_failure_names_a_module_and_the_line_of_model_code():
    class Broken(Model):
        def forward(self, input_ids):
            raise ValueError("no padding token")

    with pytest.raises(TracingError, match=r"ValueError: no padding token \[the model, test_inputs\.py:\d+\]$"):
        audit(Broken())


def test_a_classifier_without_a_padding_token_is_audited_row_by_row():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = LlamaForSequenceClassification(config).eval()
    with pytest.raises(ValueError, match="no padding token"):
        model(torch.ones(2, 4, dtype=torch.int64))
    report = audit(model)
    assert len(report.foldable) == 5
    assert "score.weight" in [consumer.weight for consumer in report.sites[-1].consumers]


def test_text_alone_comes_first():
    class Optional(Model):
        def forward(self, input_ids, pixel_values=None, bbox=None):
            return self.read(input_ids)

    first, *others = ([*run.inputs] for run in main_runs(Optional(image_size=SIDE)))
    assert first == ["input_ids"]
    assert others == [["input_ids", "bbox"], *[["input_ids", "bbox", "pixel_values"]] * 2]


def test_a_model_of_text_is_called_with_nothing_else():
    class Text(Model):
        def forward(self, input_ids, attention_mask=None):
            return self.read(input_ids)

    (run,) = main_runs(Text(image_size=SIDE, vision_config=SimpleNamespace(image_size=SIDE)))
    assert run.inputs.keys() == {"input_ids"}
    assert torch.equal(run.inputs["input_ids"], main_runs(Text())[0].inputs["input_ids"])
