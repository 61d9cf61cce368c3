"""A real post-norm model: what can be absorbed there, and what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from examples.assets import AssetError, minilm_folder
from flashnorm.passes.center import center
from flashnorm.verify.oracle import everything_in


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return minilm_folder()
    except AssetError as error:
        pytest.skip(str(error))


def test_only_the_norm_of_the_embeddings_can_be_an_rmsnorm(folder: Path) -> None:
    """Behind it, the stream is the output of a LayerNorm, which has a mean by its gain and bias."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.randint(1000, 30000, (2, 16), generator=torch.Generator().manual_seed(0))

    def hidden() -> torch.Tensor:
        with everything_in(torch.float64), torch.no_grad():
            return model(ids).last_hidden_state

    before, report, after = hidden(), center(model), hidden()
    assert report.centered == ["embeddings.LayerNorm"]
    assert list(report.keeps_bias) == ["embeddings.LayerNorm"]  # its output is the stream, in which the bias stays
    assert len(report.skipped) == 12
    assert {
        reason.partition(" is added to it")[0].split()[-1].rpartition(".")[2] for reason in report.skipped.values()
    } == {"LayerNorm"}
    assert (after - before).norm() < 1e-12 * before.norm()
    tables = (model.embeddings.word_embeddings, model.embeddings.position_embeddings)
    assert all(table.weight.mean(-1).abs().max() < 1e-15 for table in tables)
