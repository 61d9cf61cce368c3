"""What a run of the live model shows: who reads exactly what a norm returned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.errors import TracingError
from flashnorm.runtime.observing import find_probe, observe
from tests.runtime.small import Block, Norm, Sequence, Sum, llama

NORM, READER = "blocks.0.norm", "blocks.0.inner.linears.0"


def seen(block):
    model = Sequence(block)
    return observe(model, find_probe(model), {NORM})


def reads(block):
    return {call.reads for call in seen(block).calls[READER]}


def test_a_reader_of_the_whole_output_is_seen():
    assert reads(Block(Sum(False))) == {NORM}


class Between(Block):
    """Something happens between the norm and its reader."""

    def __init__(self, step):
        super().__init__(Sum(False))
        self.step = step

    def forward(self, x):
        return x.clone() + self.inner(self.step(self.norm(x), x)).view_as(x)


def write(target):
    target.mul_(1.0)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda h, x: h.view(-1, h.shape[-1]), NORM),  # a view is the same numbers
        (lambda h, x: h * 1.0, None),
        (lambda h, x: h.clone(), None),
        (lambda h, x: h.flip(0), None),
        (lambda h, x: write(h) or h, None),
        (lambda h, x: write(x) or h, None),  # raw x is what would be handed on
        (lambda h, x: x, None),
    ],
)
def test_anything_but_a_view_is_no_reading(step, expected):
    assert reads(Between(step)) == {expected}


def test_a_part_is_no_reading():
    class Part(Block):
        def forward(self, x):
            return x + self.inner(self.norm(x)[:, :1])

    assert reads(Part(Sum(False))) == {None}


def test_what_a_model_returns_is_known_with_the_model_that_returns_it():
    model = llama()
    found = observe(model, find_probe(model), {"model.norm", "model.layers.0.input_layernorm"})
    assert found.returned == {"model.norm": "model"}


def test_generation_is_part_of_the_probe_where_the_model_can():
    model = llama()
    probe = find_probe(model)
    assert probe.generation is not None
    calls = observe(model, probe, {"model.norm"}).calls["model.norm"]
    assert {call.args[0].shape[1] for call in calls} == {6, 1}  # a prompt, and single tokens behind it
    assert find_probe(Sequence(Block(Sum(False)))).generation is None


def test_the_hooks_are_gone_afterwards():
    model = Sequence(Block(Sum(False)))
    observe(model, find_probe(model), {NORM})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_cannot_be_run_is_a_tracing_error():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("out of order")

    with pytest.raises(TracingError, match="out of order"):
        find_probe(Sequence(Block(Broken(), Norm())))


@torch.no_grad()
def test_a_returned_slice_is_seen_too():
    class Outer(Sequence):
        def forward(self, input_ids):
            h = self.blocks[0].norm(self.embed(input_ids))
            return {"logits": self.head(h), "last": h[:, -1:]}

    model = Outer(Block(Sum(False)))
    assert observe(model, find_probe(model), {NORM}).returned == {NORM: "the model"}
