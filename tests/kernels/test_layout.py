from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from flashnorm.kernels import gated_ops, ops, residual_ops
from flashnorm.kernels.layout import on_device_of


@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])])
def test_the_device_of_an_operand_is_made_current(monkeypatch, current, entered):
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", lambda index: seen.append(index) or nullcontext())
    with on_device_of(SimpleNamespace(is_cuda=True, get_device=lambda: 1)):
        pass
    with on_device_of(torch.zeros(1)):
        pass
    assert seen == entered


@pytest.mark.parametrize("module", [ops, gated_ops, residual_ops])
def test_every_operation_runs_on_it(module, monkeypatch):
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(module, "on_device_of", lambda x: seen.append(x) or nullcontext())
    x, weight = torch.ones(2, 16), torch.ones(8, 16)
    if module is residual_ops:
        pytest.importorskip("triton")
        monkeypatch.setattr("flashnorm.kernels.elementwise.add_sumsq", lambda *operands: None)
        residual_ops._add(x, x)
    elif module is gated_ops:
        gated_ops.rms_swiglu_linear(x, weight, 1e-6)
    else:
        ops.rms_linear(x, weight, 1e-6)
    assert len(seen) == 1
