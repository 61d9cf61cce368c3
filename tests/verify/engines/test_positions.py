"""Models that derive their own positions are told by what they look up, and padded as they pad."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.verify.batching import check_batching
from flashnorm.verify.engines import model as engines
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.engines.positions import derives_positions
from flashnorm.verify.rounding import measure_rounding
from tests import zoo


@pytest.mark.parametrize(
    ("family", "derives"),
    [("roberta", True), ("xlm-roberta", True), ("gpt2", False), ("llama", False), ("bert", False)],
)
def test_who_derives_positions_is_seen_in_one_pass(family: str, derives: bool) -> None:
    assert derives_positions(zoo.tiny_model("causal", family), engines._logits) is derives


def test_a_decoder_that_derives_positions_is_batched_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given positions that count from nought, as before, a sound model failed."""
    model = zoo.tiny_model("causal", "roberta")
    ids = torch.randint(5, model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    engine = model_engine(model, "roberta", lambda: zoo.tiny_model("causal", "roberta"))
    rounding = measure_rounding(engine, ids[None])
    outcome = check_batching(engine, ids, rounding)
    assert outcome.passed, outcome.meaning
    assert {"another_answer (padded on the left)", "another_answer (padded on the right)"} <= {
        figure.name for figure in outcome.figures
    }
    monkeypatch.setattr(engines, "derives_positions", lambda *given: False)
    counted = replace(engine, padded=model_engine(model, "roberta").padded)
    names = {figure.name for figure in check_batching(counted, ids, rounding).failures}
    assert names == {f"another_answer (padded on the {side})" for side in ("left", "right")}
