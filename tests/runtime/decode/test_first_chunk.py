"""Prompts in buckets, with and without graphs, which here are of the host."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from flashnorm.runtime.decode import first_chunk
from flashnorm.runtime.decode.first_chunk import FirstChunk, length_bucket
from flashnorm.runtime.decode.prefill import CHUNK, _Pass
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from tests.runtime.decode.models import LENGTH, tiny, tokens
from tests.verify import host_graphs

CPU = torch.device("cpu")
SLOTS = 3
# fp32 throughout: sums of some hundred products in another order, three layers deep.
CLOSE = 1e-5


def test_a_bucket_holds_the_prompt_with_little_padding_and_fits_the_slot():
    assert [length_bucket(count, CHUNK) for count in (1, 2, 3, 65, 128, 129, 256, 2000)] == [
        1,
        2,
        4,
        128,
        128,
        256,
        256,
        2048,
    ]
    assert [length_bucket(count, LENGTH) for count in (1, 60, 65, 96)] == [1, 64, 96, 96]
    for longest in (1, 96, 300, CHUNK):
        for count in range(1, longest + 1):
            assert count <= length_bucket(count, longest) <= min(longest, max(2 * count - 1, 128 + count - 1))
    assert len({length_bucket(count, CHUNK) for count in range(1, CHUNK + 1)}) <= first_chunk._GRAPHS


@dataclass
class _Graph:
    """What a captured graph does, without a device."""

    chunk: FirstChunk
    bucket: int
    pool_: object
    logits: Tensor = field(init=False)
    replays: int = 0

    def __post_init__(self) -> None:
        self.logits = self._run()

    def _run(self) -> Tensor:
        return self.chunk._forward(self.chunk._ids[: self.bucket], self.chunk._slot, self.chunk._last)

    def replay(self) -> None:
        self.replays += 1
        self.logits.copy_(self._run())

    def pool(self) -> object:
        return self.pool_


class _Recorder:
    """In place of `FirstChunk._try` and `_record`: what was tried and captured, and where it went wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, token_bytes: int = 1, broken: tuple[int, ...] = ()) -> None:
        self.tried: list[int] = []
        self.graphs: list[_Graph] = []
        recorder, sizes = self, dict[int, int]()  # of pools

        def record(chunk: FirstChunk, bucket: int) -> tuple[first_chunk._Captured, int]:
            if bucket in broken:
                raise RuntimeError("operation not permitted when stream is capturing")
            pool = object() if chunk._pool is None else chunk._pool
            graph = _Graph(chunk, bucket, pool)
            recorder.graphs.append(graph)
            taken = max(0, bucket * token_bytes - sizes.get(id(pool), 0))
            sizes[id(pool)] = sizes.get(id(pool), 0) + taken
            return first_chunk._Captured(graph, graph.logits), taken  # type: ignore[arg-type]

        monkeypatch.setattr(FirstChunk, "_try", lambda _, bucket: recorder.tried.append(bucket))
        monkeypatch.setattr(FirstChunk, "_record", record)

    @property
    def captured(self) -> list[int]:
        return [graph.bucket for graph in self.graphs]


def seen(ids: Tensor, slot: Tensor, last: Tensor) -> Tensor:
    """A forward pass that answers with what it was given."""
    return torch.cat((slot, last, ids)).float()


def chunk_of(**options: int) -> FirstChunk:
    return FirstChunk(seen, CHUNK, SLOTS, CPU, capture=True, **options)


@pytest.mark.parametrize("capture", [False, True])
def test_the_forward_pass_sees_the_prompt_its_slot_and_its_end(capture, monkeypatch):
    _Recorder(monkeypatch)
    chunk = FirstChunk(seen, 6, SLOTS, CPU, capture=capture)
    answers = [
        chunk.run(torch.tensor(ids), slot) for ids, slot in (([5, 6, 7], 2), ([8, 9, 5, 4, 3], 0), ([7, 6, 5], 1))
    ]
    assert [answer.tolist() for answer in answers] == [[2, 2, 5, 6, 7, 7], [0, 4, 8, 9, 5, 4, 3, 3], [1, 2, 7, 6, 5, 5]]


def test_a_bucket_is_tried_and_captured_once(monkeypatch):
    recorder, chunk = _Recorder(monkeypatch), chunk_of()
    for count in (100, 90, 128, 7, 8, 100):
        chunk.run(torch.arange(count), 0)
    assert recorder.tried == recorder.captured == [128, 8]
    assert [graph.replays for graph in recorder.graphs] == [4, 2]
    assert recorder.graphs[0].pool() is recorder.graphs[1].pool()


def test_a_larger_bucket_begins_with_a_new_pool_and_smaller_ones_come_back_in_it(monkeypatch):
    recorder, chunk = _Recorder(monkeypatch), chunk_of()
    for count in (8, 16, 8, 16):
        chunk.run(torch.arange(count), 0)
    assert recorder.captured == [8, 16, 8]
    old, large, small = (graph.pool() for graph in recorder.graphs)
    assert old is not large
    assert large is small
    assert chunk._held == 16


def test_the_bucket_used_longest_ago_makes_room(monkeypatch):
    monkeypatch.setattr(first_chunk, "_GRAPHS", 2)
    recorder, chunk = _Recorder(monkeypatch), chunk_of()
    for count in (16, 8, 16, 4, 16, 8):  # 4 drops 8, and 8 drops 4
        chunk.run(torch.arange(count), 0)
    assert recorder.captured == [16, 8, 4, 8]


def test_what_would_hold_too_much_runs_eagerly(monkeypatch):
    recorder, chunk = _Recorder(monkeypatch), chunk_of(held=100)
    for count in (64, 128, 256, 64, 64):
        assert chunk.run(torch.arange(count), 1).tolist() == [1, count - 1, *range(count)]
    assert recorder.captured == [64, 128, 64]  # 256 is not tried any more


@pytest.mark.parametrize("broken", [(64,), (16,), (16, 64)])
def test_a_capture_that_fails_is_told_and_the_program_goes_on(broken, monkeypatch):
    recorder, chunk = _Recorder(monkeypatch, broken=broken), chunk_of()
    with pytest.warns(RuntimeWarning, match="not permitted when stream is capturing") as warned:
        answers = [chunk.run(torch.arange(count), 1).tolist() for count in (32, 64, 16, 64, 16)]
    assert answers == [[1, count - 1, *range(count)] for count in (32, 64, 16, 64, 16)]
    assert len(warned) == len(broken)
    assert set(recorder.captured) == {32, 64, 16} - set(broken)


def prompted(name: str, ids: list[int], **options: object) -> tuple[Program, Tensor]:
    """A program that holds a prompt in its second slot of three, and the logits after it."""
    program = Program(read_spec(tiny(name), max_length=LENGTH), slots=SLOTS, **options)
    return program, program.prefill(1, ids)


def assert_padding_is_not_seen(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the prompt without padding; other slots, and what lies behind the bucket, are as they were."""
    ids = tokens(count)
    padded, logits = prompted(name, ids)
    with monkeypatch.context() as exactly:
        exactly.setattr(first_chunk, "length_bucket", lambda tokens, _: tokens)
        exact, expected = prompted(name, ids)
    assert (logits - expected).norm() <= CLOSE * expected.norm()
    for written, wanted in zip(
        (*padded.cache.keys, *padded.cache.values), (*exact.cache.keys, *exact.cache.values), strict=True
    ):
        held = wanted[1, :, :count]
        assert (written[1, :, :count] - held).norm() <= CLOSE * held.norm()
        assert not written[[0, 2, 3]].any()
        assert not written[1, :, length_bucket(count, LENGTH) :].any()
        assert not wanted[1, :, count:].any()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "glm4"])
@pytest.mark.parametrize("count", [1, 5, 17, 70])  # the last one's bucket, cut to the slot, holds 96
def test_padding_is_not_seen(name, count, monkeypatch):
    assert_padding_is_not_seen(name, count, monkeypatch)


@pytest.mark.parametrize(("number", "off"), [("_last", 1), ("_last", -1), ("_slot", 1), ("_slot", -1)])
def test_a_wrong_end_and_a_wrong_slot_are_seen(number, off, monkeypatch):
    usual = FirstChunk._fill

    def fill(chunk: FirstChunk, ids: Tensor, bucket: int, slot: int) -> None:
        usual(chunk, ids, bucket, slot)
        if bucket > len(ids):
            getattr(chunk, number).add_(off)

    monkeypatch.setattr(FirstChunk, "_fill", fill)
    with pytest.raises(AssertionError):
        assert_padding_is_not_seen("llama", 17, monkeypatch)


def test_attention_that_sees_the_padding_is_seen(monkeypatch):
    usual = torch.nn.functional.scaled_dot_product_attention

    def uncausal(*arguments: object, is_causal: bool, **options: object) -> Tensor:
        return usual(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", uncausal)
    with pytest.raises(AssertionError):
        assert_padding_is_not_seen("llama", 17, monkeypatch)


def assert_replay_equals_eager(monkeypatch: pytest.MonkeyPatch, chunk: int = CHUNK) -> None:
    """Bitwise, while slots change hands between replays of one graph; prompts of more than a chunk go on eagerly."""
    host_graphs.install(monkeypatch)
    spec = read_spec(tiny("gemma3"), max_length=LENGTH)
    eager, replayed = (Program(spec, slots=SLOTS, graphs=graphs, chunk=chunk) for graphs in (False, True))
    answers = []
    for round_, slot in enumerate((0, 2, 1, 2, 0)):
        ids = tokens(40 + round_, seed=round_)
        for program in (eager, replayed):
            if slot not in program.free_slots():
                program.free(slot)
        answers.append((eager.prefill(slot, ids), replayed.prefill(slot, ids)))
    assert all(torch.equal(*pair) for pair in answers)  # the first one's, too, after the last
    assert len({tuple(answer.tolist()) for answer, _ in answers}) == len(answers)
    for ours, theirs in zip(
        eager.cache.keys + eager.cache.values, replayed.cache.keys + replayed.cache.values, strict=True
    ):
        assert torch.equal(ours[:SLOTS], theirs[:SLOTS])
    assert list(replayed._prefill._first._graphs) == [min(64, chunk)]


@pytest.mark.parametrize("chunk", [CHUNK, 16])
def test_replay_equals_eager_bitwise_and_answers_stay(chunk, monkeypatch):
    assert_replay_equals_eager(monkeypatch, chunk)


@pytest.mark.parametrize("number", ["slot", "last"])
def test_a_number_that_the_capture_froze_is_seen(number, monkeypatch):
    usual = _Pass.first

    def frozen(self: _Pass, ids: Tensor, slot: Tensor, last: Tensor) -> Tensor:
        given = {"slot": slot, "last": last}
        given[number] = torch.full_like(given[number], int(given[number]))
        return usual(self, ids, **given)

    monkeypatch.setattr(_Pass, "first", frozen)
    with pytest.raises(AssertionError):
        assert_replay_equals_eager(monkeypatch)


def test_a_dropped_program_frees_its_cache_at_once():
    program = prompted("llama", tokens(9))[0]
    cache = weakref.ref(program.cache)
    gc.collect()
    gc.disable()
    try:
        del program
        assert cache() is None
    finally:
        gc.enable()
