"""On a GPU: the battery on a decode program that runs its kernels in captured graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashnorm
from tests.runtime.decode.models import tiny as decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU; test_no_false_alarm.py runs everywhere"
    ),
]


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_healthy_model_passes_on_the_device(accelerated: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder("llama", dtype).save_pretrained(tmp_path)
    report = flashnorm.battery(tmp_path, level="quick", accelerated=accelerated, device="cuda")
    assert report.passed, report.verdict
