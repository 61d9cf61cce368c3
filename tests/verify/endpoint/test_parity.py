"""A server of the checkpoint passes in any dtype, folded or not; one with a mistake in one layer is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flashnorm.verify.endpoint.parity import judge_parity
from flashnorm.verify.endpoint.suite import endpoint_battery
from flashnorm.verify.outcome import BatteryReport, Outcome
from tests.verify.endpoint import server
from tests.verify.faults import folded_twice, value_projection_missed
from tests.verify.tiny import folded, save, tiny_model, tokenizer

DTYPES = (torch.float32, torch.bfloat16)


def _checkpoint(dtype: torch.dtype, family: str = "llama") -> nn.Module:
    return server.sure(tiny_model(family, dtype))


def _report(served: nn.Module, reference: Path | None, **options: object) -> BatteryReport:
    with server.serving(server.completions(served, **options)) as url:
        return endpoint_battery(url, "tiny", reference=reference, level="quick", only=["parity"])


@pytest.mark.parametrize(
    ("family", "stored", "served"),
    [
        ("llama", torch.float32, torch.float32),
        ("llama", torch.float32, torch.bfloat16),
        ("llama", torch.bfloat16, torch.bfloat16),
        ("mixtral", torch.float32, torch.bfloat16),  # near ties between experts turn over
    ],
)
def test_a_server_of_the_checkpoint_passes_in_either_dtype(
    family: str, stored: torch.dtype, served: torch.dtype, tmp_path: Path
) -> None:
    reference = save(_checkpoint(stored, family), tmp_path / "model")
    for change in (lambda model: model, folded):
        report = _report(change(_checkpoint(stored, family)).to(served), reference)
        assert report.passed, report.verdict
        assert not report["parity"].skipped


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [folded_twice, value_projection_missed])
def test_a_mistake_in_one_layer_is_told_apart(fault, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save(_checkpoint(dtype), tmp_path / "model")
    report = _report(fault(_checkpoint(dtype)), reference)
    assert {figure.name for figure in report["parity"].failures} == {"drift_ratio", "typical_drift_ratio"}
    assert "it does not compute what the checkpoint says" in report.verdict


def test_what_cannot_be_compared_is_skipped_with_the_reason(tmp_path: Path) -> None:
    reference = save(_checkpoint(torch.float32), tmp_path / "model")
    silent = _report(_checkpoint(torch.float32), reference, echoes=False)
    assert "does not echo prompts: " in silent["parity"].skipped
    assert "echo is not supported" in silent["parity"].skipped
    alone = _report(_checkpoint(torch.float32), None, tokenizer=tokenizer())
    assert alone["parity"].skipped == "there is nothing to compare with; give --reference DIR"


def test_a_server_of_another_vocabulary_is_told(tmp_path: Path) -> None:
    def other_names(number: int, body: dict, answer: dict) -> None:
        for choice in answer["choices"] if body.get("echo") else ():
            steps = choice["logprobs"]["top_logprobs"]
            steps[2] = {f"token_id:{999 + n}": value for n, value in enumerate(steps[2].values())}

    reference = save(_checkpoint(torch.float32), tmp_path / "model")
    with (
        server.serving(server.completions(_checkpoint(torch.float32))) as url,
        server.serving(server.proxy(url, other_names)) as bad,
    ):
        report = endpoint_battery(bad, "tiny", reference=reference, level="quick", only=["parity"])
    assert "at token 2 of prompt 0 the server names no token that the checkpoint has" in report.verdict


def _judged(factor: float) -> Outcome:
    """Noise of the reference's size, times `factor` at the server: mean squares over five tokens, as servers name."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(92, 2, 5, generator=generator, dtype=torch.float64).square().mean(-1)
    return judge_parity(noise * torch.tensor([factor**2, 1.0]), [str(n) for n in range(92)])


def test_the_bound_lies_above_equal_noise_and_below_three_times_that() -> None:
    assert _judged(1).passed
    assert _judged(0.1).passed
    assert {figure.name for figure in _judged(3).failures} == {"drift_ratio", "typical_drift_ratio"}
    assert judge_parity(torch.zeros(4, 2, dtype=torch.float64), list("abcd")).passed
    broken = judge_parity(torch.full((4, 2), float("nan"), dtype=torch.float64), list("abcd"))
    assert [figure.name for figure in broken.failures] == ["unusable_places"]
