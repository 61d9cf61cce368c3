"""The whole step as one kernel on the CPU: its source, with threads that take turns, against `TorchStep`.

Python packs what the kernel reads, and `DecodeStep` launches it, as on a GPU; only compiler and driver are others.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from flashnorm.kernels.cuda.memory import Ring
from flashnorm.passes.fold import fold
from flashnorm.runtime.decode import one_kernel, reference
from flashnorm.runtime.decode.cache import allocate
from flashnorm.runtime.decode.packing import Packing, pack
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.spec import Attention, Spec, linears_of
from flashnorm.runtime.decode.step import TorchStep
from tests.kernels.cuda.on_host import Fault, library
from tests.runtime.decode.models import LENGTH, tiny

decode_step = pytest.importorskip("flashnorm.kernels.cuda.decode_step", reason="NVIDIA's bindings are not installed")
kernels = decode_step.kernels
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SLOTS, SLOT = 2, 1
TOKENS = (5, 6, 7, 8, 9)
NOISE = 0.01  # of a sum of some hundred numbers in fp32, in units of the rounding of 16-bit floats


@dataclass(frozen=True, eq=False)
class Case:
    """A model of `models.SUPPORTED` with changes, tokens in the cache, and how the kernel is laid out."""

    name: str
    config: dict[str, Any]
    lengths: tuple[int, ...] = (0, 7, 95)
    warps: int = 2
    columns: int = 2048
    blocks: int = 4
    stretch: int = 16
    dtype: torch.dtype = torch.bfloat16
    folded: bool = False
    timed: bool = False


GROUPED = Case("llama", {}, folded=True)
# More key heads than blocks, each with one query head; more outputs of a block than it finishes at once.
SINGLE = Case(
    "qwen3",
    {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 40, "intermediate_size": 96},
    lengths=(0, 70),
    columns=24,
    blocks=3,
)
CAPPED = Case("gemma2", {"hidden_size": 64, "vocab_size": 64}, lengths=(0, 95), columns=8)
TURNED = Case(
    "glm4",
    {"hidden_size": 96, "num_key_value_heads": 1, "num_attention_heads": 8, "intermediate_size": 64},
    lengths=(0, 95),
    columns=24,
    warps=4,
    timed=True,
)
# More blocks than linears have pairs of outputs, but for one; one key head in more stretches than are joined at once.
SPREAD = Case(
    "granite",
    {"hidden_size": 16, "intermediate_size": 576, "num_key_value_heads": 1, "num_attention_heads": 1, "head_dim": 8},
    lengths=(0, 7, 41, 95),
    columns=64,
    blocks=18,
    stretch=5,
)
PLAIN = Case("arcee", {"mlp_bias": True, "intermediate_size": 160}, columns=96, dtype=torch.float16, folded=True)
CASES = GROUPED, SINGLE, CAPPED, TURNED, SPREAD, PLAIN


@cache
def model_of(case: Case) -> tuple[Spec, Packing]:
    model = tiny(case.name, case.dtype, num_hidden_layers=2, **case.config)
    if case.folded:
        fold(model)
    spec = read_spec(model, max_length=LENGTH)
    return spec, pack(spec)


class Run:
    """The kernel, `TorchStep` in the model's dtype, and in fp32 on the same values; each with its own cache.

    Slot SLOT holds `length` tokens of noise. All else is NaN, so that whatever is read of it shows.
    """

    def __init__(self, case: Case, monkeypatch, *planted: tuple[str, str], checked: bool = True) -> None:
        self.case = case
        self.spec, self.packing = model_of(case)
        monkeypatch.setattr(reference, "project", project)
        self.specs = [self.spec, self.spec, in_fp32(self.spec)]
        self.caches = [allocate(spec, SLOTS, LENGTH) for spec in self.specs]
        self.kernel = self._kernel(monkeypatch, planted, checked)
        self.steps = [self.kernel, *(TorchStep(*both) for both in zip(self.specs[1:], self.caches[1:], strict=True))]

    def _kernel(self, monkeypatch, planted: tuple[tuple[str, str], ...], checked: bool):
        shape, cache, case = one_kernel.shape_of(self.spec), self.caches[0], self.case
        settings = decode_step.settings(shape, case.warps, case.columns)
        ring = Ring(settings.ring.slot, 3)
        settings = replace(settings, ring=ring, on_the_way=2, ahead=2, stretch=case.stretch, timed=case.timed)
        built = library(decode_step.source(shape, settings), "step.inc", planted, checked=checked)
        parts = zip(self.spec.layers, self.packing.layers, cache.keys, cache.values, strict=True)
        layers = [one_kernel.layer_data(*of_layer) for of_layer in parts]
        ends = one_kernel._ends(self.spec)
        built.allow(tensors_of((layers, ends)))
        self.bytes_read: list[int] = []

        def launch(_function: object, grid: Any, arguments: tuple[bytes], _stream: object) -> None:
            self.bytes_read.append(built.play(*arguments, grid.blocks, grid.shared, seed=len(self.bytes_read)))

        loaded = kernels.Kernel(None, decode_step.shared_bytes(shape, settings), case.blocks)
        monkeypatch.setattr(decode_step, "_kernel", lambda *_: loaded)
        monkeypatch.setattr(decode_step, "launch", launch)
        monkeypatch.setattr(decode_step, "current_stream", lambda _device: 0)
        return decode_step.DecodeStep(shape, layers, ends, settings)

    def fill(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        for tensors in zip(*(both.keys + both.values for both in self.caches), strict=True):
            for tensor in tensors:
                tensor.fill_(torch.nan)
            noise = torch.randn(tensors[0][SLOT, :, :length].shape, generator=generator).to(self.spec.dtype)
            for tensor in tensors:
                tensor[SLOT, :, :length] = noise

    def step(self, length: int, token: int) -> None:
        """One more token, and what all three make of it."""
        slots, chosen, lengths = torch.tensor([SLOT]), torch.full((SLOTS,), token), torch.full((SLOTS,), length)
        self.logits = [step(slots, chosen, lengths)[0] for step in self.steps]

    def off(self, length: int) -> float:
        """How far the kernel's last step is from `TorchStep`'s, in units of how far rounding took that from fp32.

        The larger of logits and of the keys and values that were appended.
        """
        appended = [
            torch.cat([part[SLOT, :, length].flatten().float() for part in cache.keys + cache.values])
            for cache in self.caches
        ]
        return max(distance(mine, plain) / distance(plain, exact) for mine, plain, exact in (self.logits, appended))

    def rest_of_cache(self, length: int) -> Tensor:
        """All that the kernel's cache holds but for what a step appends, as bits."""
        parts = torch.stack(self.caches[0].keys + self.caches[0].values).view(torch.int16)
        return torch.cat([parts[:, 1 - SLOT], parts[:, SLOT, :, :length], parts[:, SLOT, :, length + 1 :]], 2)

    def bytes_needed(self, length: int) -> int:
        """Of a step: every weight once, and keys and values of what a layer sees."""
        linears = [*(linear for layer in self.spec.layers for linear in linears_of(layer)), self.spec.head.linear]
        heads = [(layer.attention, layer.attention.window or LENGTH + 1) for layer in self.spec.layers]
        cached = sum(2 * a.kv_heads * a.head_dim * min(length, window - 1) for a, window in heads)
        return self.spec.dtype.itemsize * (sum(linear.weight.numel() for linear in linears) + cached)


def distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).norm().item()


def project(x: Tensor, by: Attention, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.project`, but q and k are rounded before they are normed and turned too, as between two kernels."""
    normed = reference.norm(x, by.norm)
    q, k, v = (
        reference.linear(normed, part).to(part.weight.dtype).to(x.dtype).unflatten(-1, (-1, by.head_dim))
        for part in (by.q, by.k, by.v)
    )
    q, k = (reference.norm(part, norm) for part, norm in ((q, by.q_norm), (k, by.k_norm)))
    return reference.rotate(q, by.rope, positions), reference.rotate(k, by.rope, positions), v


def in_fp32(data: Any) -> Any:
    """A spec of the same values."""
    if isinstance(data, Tensor):
        return data.detach().float()
    if isinstance(data, tuple):
        return tuple(map(in_fp32, data))
    if is_dataclass(data):
        return replace(data, **{field.name: in_fp32(getattr(data, field.name)) for field in fields(data)})
    return data


def tensors_of(data: object) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for part in data:
            yield from tensors_of(part)
    elif is_dataclass(data):
        for field in fields(data):
            yield from tensors_of(getattr(data, field.name))


def check(run: Run, length: int) -> None:
    """Appends a token to `length` others, and others in its place until one step is the oracle's but for fp32's noise.

    Kernel and oracle round at the same places. Their fp32 sums differ in order, by less than NOISE; and, where such a
    sum falls between two numbers of the dtype, by what rounding may do at most: both are as far from fp32.
    """
    for token in TOKENS:
        run.fill(length)
        before = run.rest_of_cache(length)
        run.step(length, token)
        off = run.off(length)
        assert off <= 2
        assert torch.equal(run.rest_of_cache(length), before)
        assert run.bytes_read[-1] == run.bytes_needed(length)
        if off <= NOISE:
            return
    raise AssertionError(f"no step rounds as the oracle does; the last is off by {off}")


def test_the_cases_take_rows_in_every_way():
    """In one, two, four and eight pieces, and those in one block of columns of a warp or in two."""
    ways = set()
    for case in CASES:
        for width in decode_step._widths(one_kernel.shape_of(model_of(case)[0])):
            columns = decode_step._columns(width, case.columns)
            ways.add((width // columns, -(-columns // (32 * case.warps))))
    assert ways >= {(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (8, 1), (8, 2)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_step_is_right(case, monkeypatch):
    run = Run(case, monkeypatch)
    for length in case.lengths:
        check(run, length)
    if case.timed:
        assert all(0 <= share < 1 for share in run.kernel.waited().values())


def test_steps_end_themselves_and_outlive_the_epochs(monkeypatch):
    """Each takes the token that the one before chose; the second is the last of its epochs, and forgets all words."""
    run = Run(GROUPED, monkeypatch)
    kernel, slots, following = run.kernel, torch.tensor([SLOT]), torch.zeros(1, dtype=torch.long)
    chosen, lengths = torch.tensor([0, 5]), torch.tensor([3, 20])
    kernel._epoch[0] = -5  # of 2^32, and two a step
    run.fill(20)
    for length, epoch in ((20, -3), (21, 0), (22, 2), (23, 4)):
        plain = run.steps[1](slots, chosen, lengths)
        exact = run.steps[2](slots, chosen, lengths)
        logits = kernel.settled(slots, chosen, lengths, following, spare=0)
        assert distance(logits, plain) <= 2 * distance(plain, exact)
        assert following.item() == logits.argmax().item()
        assert chosen.tolist() == [0, following.item()]
        assert lengths.tolist() == [3, length + 1]
        assert kernel._epoch.tolist() == [epoch, 0]
        assert kernel._words.any() == (epoch != 0)


def test_a_spare_slot_does_not_grow_and_nan_has_a_token(monkeypatch):
    run = Run(GROUPED, monkeypatch)
    run.fill(2)
    chosen, lengths, following = torch.tensor([0, 5]), torch.tensor([3, 2]), torch.zeros(1, dtype=torch.long)
    for keys in run.caches[0].keys:
        keys[SLOT] = torch.nan
    logits = run.kernel.settled(torch.tensor([SLOT]), chosen, lengths, following, spare=SLOT)
    assert logits.isnan().all()
    assert following.item() == logits.shape[1] - 1
    assert lengths.tolist() == [3, 0]


WEIGHTS = "float weights[WARPS][AT_ONCE][MOST_SHARING]", "float weights[WARPS][AT_ONCE / 2][MOST_SHARING]"
AWAIT = "const u16* keys = cached ? (const u16*)await(ring, at) : heads.new_key();"


@pytest.mark.parametrize(
    ("case", "length", "planted"),
    [
        pytest.param(GROUPED, 95, [WEIGHTS], id="warps share attention's weights"),
        pytest.param(GROUPED, 20, [(" || (u32)(words[i][1] >> 32) != epoch", "")], id="a word is not awaited"),
        pytest.param(
            GROUPED,
            95,
            [
                (AWAIT, AWAIT + " if (cached) release(&ring.empty[at.slot]);"),
                ("            done(ring, at, read)", "            at.advance()"),
            ],
            id="a slot is released too early",
        ),
        pytest.param(TURNED, 0, [("sum, 10)", "sum, 9)")], id="a wrong lane's sum"),
        pytest.param(GROUPED, 95, [("keys + SLOT / 4", "keys")], id="keys for values"),
        pytest.param(SPREAD, 41, [("share = STRETCH;", "share = STRETCH - 1;")], id="stretches that leave a token out"),
        pytest.param(SPREAD, 41, [("(left > 0) + (left > JOINING)", "left > 0")], id="a stretch that is not joined"),
    ],
)
def test_a_wrong_step_is_seen(case, length, planted, monkeypatch):
    run = Run(case, monkeypatch, *planted, checked=False)
    with pytest.raises((AssertionError, Fault)):
        check(run, length)


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        (WEIGHTS, "indexes outside of an array"),
        (("if (share.count) take_pairs<INNER>", "sync_consumers(); if (threadIdx.x) take_pairs<INNER>"), "hangs"),
    ],
)
def test_what_a_gpu_would_not_forgive_is_seen(planted, seen, monkeypatch):
    run = Run(GROUPED, monkeypatch, planted)
    with pytest.raises(Fault, match=seen):
        check(run, 20)
