"""Live modules as subjects, and that one model is in memory at a time."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import flashnorm
from flashnorm.verify.evaluate import evaluate
from flashnorm.verify.samples import make_samples
from flashnorm.verify.subject import open_subject
from tests.verify.tiny import folded, save, tiny_model


def test_a_copy_of_a_module_is_its_own() -> None:
    module = tiny_model("llama", torch.bfloat16).train()
    module.model.embed_tokens.register_buffer("table", torch.ones(3))
    before = copy.deepcopy(module.state_dict())
    found = open_subject(module).load(torch.float64)
    assert not found.training
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert {p.dtype for p in found.parameters()} == {torch.float64}
    assert found.model.embed_tokens.table.dtype == torch.float32
    with torch.no_grad():
        for tensor in (*found.parameters(), *found.buffers()):
            tensor.fill_(7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert open_subject(module).load(None).lm_head.weight.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_module_on_the_gpu_is_verified_on_the_cpu() -> None:
    source = tiny_model("llama").cuda()
    report = flashnorm.verify(source, folded(source), new_tokens=4)
    assert report.passed
    assert next(source.parameters()).is_cuda


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_one_model_at_a_time(dtype: torch.dtype | None, stored: torch.dtype, tmp_path: Path) -> None:
    """Each load begins when the model before it is gone: the choice of the oracle counts on it."""
    subject = open_subject(save(tiny_model("llama", stored), tmp_path / "llama"))
    alive: list[weakref.ref[Any]] = []

    def load(wanted: torch.dtype | None) -> Any:
        assert not [ref for ref in alive if ref() is not None]
        model = subject.load(wanted)
        alive.append(weakref.ref(model))
        return model

    watched = dataclasses.replace(subject, load=load)
    answers = evaluate(watched, make_samples(subject, None, 8, 8), 0, dtype, None, lambda step: None)
    assert answers.arithmetic.stored == stored
    assert not [ref for ref in alive if ref() is not None]
