"""Every verdict holds on real architectures: what is centered changes no logit, what is refused would."""

from __future__ import annotations

import copy

import pytest
import torch

from flashnorm.passes.center import apply_center, center
from flashnorm.passes.centered_norm import CenteredNorm
from flashnorm.sites.audit import audit
from flashnorm.sites.centering import audit_centering
from tests import zoo
from tests.cancelling.examine import TOLERANCE, change, in_fp64, logits
from tests.centering.examine import examine, moved, refused
from tests.centering.record import DOCUMENTS
from tests.zoo.known import known

# Tied and untied heads, a norm of single heads, no gain at all, sines in the stream, a mixture of experts, an indexer.
SAMPLE = ["gpt2", "gpt_neox", "persimmon", "olmo", "ctrl", "phimoe", "deepseek_v32"]
RECORD = DOCUMENTS.read()


@pytest.mark.parametrize("model_type", SAMPLE)
def test_centering_changes_nothing_and_the_record_holds(model_type: str) -> None:
    outcome = examine(known("causal", model_type))
    assert outcome.right, (outcome.error, outcome.error_small)
    if RECORD.of_this_transformers:
        then = RECORD.of(model_type)
        for part in ("layer_norms", "centered", "untied", "keeps_bias", "no", "over_cautious", "unforced", "refused"):
            assert getattr(outcome, part) == getattr(then, part), "run `python -m tests.centering`, look at the change"


def test_the_record_is_of_every_type_and_every_one_is_right() -> None:
    if RECORD.of_this_transformers:
        assert {row.model_type for row in RECORD.outcomes} | set(RECORD.unbuilt) == set(zoo.model_types("causal"))
    assert all(row.right for row in RECORD.outcomes)
    assert all(bool(row.centered or row.untied or row.no) == row.layer_norms for row in RECORD.outcomes)
    assert all(reason for row in RECORD.outcomes for reason in (*row.no.values(), *row.keeps_bias.values()))


def test_the_table_is_generated_from_the_record() -> None:
    assert DOCUMENTS.table.read_text() == DOCUMENTS.text(RECORD)


def test_the_known_verdicts() -> None:
    """Pre-LN models become RMSNorm models, those with a tied head once it is untied; post-norm models do not."""
    assert len(RECORD.of("gpt_neox").centered) == 3
    assert not RECORD.of("gpt_neox").no
    assert RECORD.of("gpt2").centered == []
    assert len(RECORD.of("gpt2").untied) == 3
    assert RECORD.of("bert").untied == ["bert.embeddings.LayerNorm"]
    assert (
        "the output of bert.embeddings.LayerNorm"
        in RECORD.of("bert").no["bert.encoder.layer.*.attention.output.LayerNorm"]
    )
    assert not RECORD.of("llama").layer_norms


def test_a_model_wholly_centered_is_an_rmsnorm_model_that_folds() -> None:
    model = zoo.tiny_model("causal", known("causal", "gpt_neox"))
    report = center(model)
    assert not report.skipped
    sites = audit(model).sites
    assert {site.convention.kind for site in sites if site.convention} == {"RMSNorm"}
    assert all(site.foldable for site in sites)


def test_a_norm_of_images_is_right_on_images() -> None:
    """A tower that text does not reach is traced by itself; here an image runs through it."""
    model = zoo.tiny_model("image_text", known("image_text", "gemma3")).double()
    inputs = zoo.forward_inputs(model, "image_text", with_images=True)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    before = logits(model, inputs)
    report = center(model)
    after = logits(model, inputs)
    assert any("vision_tower" in norm and norm.endswith("layer_norm1") for norm in report.centered)
    assert change(before, after) <= TOLERANCE
    ran: list[bool] = []
    for module in model.modules():
        if isinstance(module, CenteredNorm):
            module.register_forward_hook(lambda *_: ran.append(True))
    zoo.logits(model.float(), {**inputs, "pixel_values": inputs["pixel_values"].float()})
    assert ran


def test_a_forced_refusal_would_be_seen() -> None:
    """The negative control of every comparison above."""
    model = zoo.tiny_model("causal", known("causal", "bloom"))
    report = audit_centering(model, untie=True)
    model, inputs = in_fp64(model)
    before = logits(model, inputs)
    chosen = next(c for c in refused(report) if c.norm.endswith("input_layernorm"))
    assert moved(model, [chosen], report, True, inputs, before) > 1e4 * TOLERANCE


def test_parameters_alone_leave_a_model_of_layernorms_that_computes_the_same() -> None:
    model = zoo.tiny_model("causal", known("causal", "gpt_neox"))
    report = audit_centering(model)
    changed = copy.deepcopy(model)
    apply_center(changed, [c for c in report.centerings if c.centerable], report, keep_modules=True)
    assert list(changed.state_dict()) == list(model.state_dict())
    assert [type(m) for m in changed.modules()] == [type(m) for m in model.modules()]
    inputs = zoo.forward_inputs(model, "causal")
    before, after = zoo.logits(model, inputs), zoo.logits(changed, inputs)
    # fp32, as in tests.coverage.examine: sqrt(D K) roundings of 2^-24 for D weights of K products.
    assert (after - before).norm() < 1e-5 * before.norm()


def test_generation_with_a_cache_goes_on_alike() -> None:
    model = zoo.tiny_model("causal", known("causal", "gpt2"))
    centered = copy.deepcopy(model)
    assert center(centered, untie=True).centered
    ids = zoo.forward_inputs(model, "causal")["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    before, after = (m.generate(ids, pad_token_id=0, **options) for m in (model, centered))
    assert torch.equal(before.sequences, after.sequences)
    for a, b in zip(after.logits, before.logits, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()  # fp32, as above
