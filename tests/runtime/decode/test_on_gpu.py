"""Captured steps on a GPU. What they compute is tested on the CPU, through plain torch and Triton's interpreter."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.sampling import Sampling
from tests.runtime.decode.models import SUPPORTED, scattered, tiny, tokens

decode_step = pytest.importorskip("flashnorm.kernels.cuda.decode_step", reason="NVIDIA's bindings are not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LENGTH, PROMPT, ROWS = 600, 300, 5


def medium() -> nn.Module:
    """Four layers as wide as a model of a billion parameters, in bf16."""
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    with torch.device("cuda"):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return medium()


def filled(model: nn.Module, sampling: Sampling = Sampling(), **options: object) -> Program:  # noqa: B008
    program = Program(read_spec(model, max_length=LENGTH), **{"slots": ROWS, **options})
    for slot in range(ROWS):
        program.prefill(slot, [t % 100 for t in tokens(PROMPT - 50 * slot, seed=slot)], sampling)
    return program


def far_apart(model: nn.Module, length: int, **options: object) -> torch.Tensor:
    """Logits of the last eight of `length` tokens, as a program with these options decodes them."""
    ids = [t % 100 for t in tokens(length)]
    program = Program(read_spec(model, max_length=length), slots=2, **options)
    program.prefill(1, ids[:-8])
    logits = torch.cat([program.decode({1: token}) for token in ids[-8:]])
    program.close()
    return logits


def joining_and_leaving() -> Iterator[tuple[int, ...]]:
    for _ in range(8):
        yield from [(0,), (3, 1), (4, 0, 2), (0, 1, 2, 3, 4), (2,)]


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=3)])
def test_replay_equals_eager_bitwise(model, sampling, one_kernel):
    eager, captured = (filled(model, sampling, graphs=graphs, one_kernel=one_kernel) for graphs in (False, True))
    for active in joining_and_leaving():
        assert torch.equal(eager.advance(active), captured.advance(active))
        given = {slot: 7 + slot for slot in active}
        assert torch.equal(eager.decode(given), captured.decode(given))


@pytest.mark.parametrize(("active", "one_kernel"), [((0, 1, 2), False), ((1,), False), ((1,), True)])
def test_a_thousand_replays_are_the_same(model, active, one_kernel):
    program = filled(model, one_kernel=one_kernel)
    state = program._state
    program.advance(active)
    kept = state.lengths.clone(), state.chosen.clone()
    first = None
    for _ in range(1000):
        state.lengths.copy_(kept[0])
        state.chosen.copy_(kept[1])
        logits, following = program._runner.run(active, greedy=True)
        first = (logits.clone(), following.clone()) if first is None else first
        assert torch.equal(logits, first[0])
        assert torch.equal(following, first[1])


@torch.no_grad()
def _uncached(model: nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids], device="cuda"), use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize(("rows", "one_kernel"), [(1, False), (3, False), (1, True)])
def test_cached_logits_are_not_farther_from_fp32_than_stocks(name, rows, one_kernel):
    """Every step of 76: bf16 program and bf16 stock model against the fp32 model of the same values."""
    half = tiny(name, torch.bfloat16).cuda()
    exact = tiny(name).cuda()
    exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    ids = tokens(96)
    expected, stock = _uncached(exact, ids), _uncached(half, ids)
    program = Program(read_spec(half, max_length=96), slots=rows, one_kernel=one_kernel)
    for slot in range(rows):
        program.prefill(slot, ids[:20])
    mine = torch.stack([program.decode(dict.fromkeys(range(rows), ids[at]))[-1] for at in range(20, 96)])
    assert (mine - expected[20:]).norm() <= 1.05 * (stock[20:] - expected[20:]).norm()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_fp32_steps_agree_with_stock_at_every_step(name):
    """Exact enough to find a step that reads the previous step's buffer: matmuls in fp32, without TF32."""
    model, ids = tiny(name).cuda(), tokens(96)
    expected = _uncached(model, ids)
    program = Program(read_spec(model, max_length=96), slots=2)
    program.prefill(1, ids[:20])
    for at in range(20, 96):
        logits = program.decode({1: ids[at]})[0]
        assert (logits - expected[at]).norm() <= 2e-5 * expected[at].norm()


@pytest.mark.parametrize("length", [9, 70, 300, 1000, 3500])
def test_one_kernel_is_as_near_to_fp32_as_many(model, length):
    """At lengths of one block and of many for each head."""
    many, one = (far_apart(model, length, one_kernel=one_kernel) for one_kernel in (False, True))
    exact = far_apart(copy.deepcopy(model).float(), length)
    assert (one - exact).norm() <= 1.05 * (many - exact).norm()


def test_one_kernel_can_say_what_it_waits_for(model, monkeypatch):
    plain = far_apart(model, 100, one_kernel=True)
    usual = decode_step.settings_for  # of a small model: nothing is asked into the L2
    monkeypatch.setattr(decode_step, "settings_for", lambda shape: replace(usual(shape), timed=True, ahead=4))
    assert torch.equal(far_apart(model, 100, one_kernel=True), plain)
    program = filled(model, one_kernel=True)
    program.advance((0,))
    waited = program._runner._step._whole.waited()
    assert all(0 <= share < 1 for share in waited.values())
    assert sum(waited[name] for name in ("slot", "words", "warps")) < 1
    assert waited["slot"] > 0


def test_two_steps_of_one_kernel_each_at_once(model):
    """Each fills the whole GPU and waits for its own blocks: none may be left half started."""
    programs = [filled(model, one_kernel=True) for _ in range(2)]
    expected = [programs[0].advance((0,)).item() for _ in range(200)]
    programs = [filled(model, one_kernel=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in programs]
    for program in programs:
        program.advance((0,))
    torch.cuda.synchronize()
    taken: list[list[torch.Tensor]] = [[], []]
    for _ in range(199):
        for program, stream, tokens_ in zip(programs, streams, taken, strict=True):
            with torch.cuda.stream(stream):
                tokens_.append(program.advance((0,)))
    torch.cuda.synchronize()
    assert all([token.item() for token in tokens_] == expected[1:] for tokens_ in taken)


def test_a_second_program_and_a_swept_allocator_disturb_nothing(model):
    alone = [program_tokens(filled(model))]
    first, second = filled(model), Program(read_spec(scattered(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=101,
    )).cuda(), max_length=LENGTH), slots=1)  # fmt: skip
    second.prefill(0, tokens(9))
    taken = []
    for step in range(40):
        taken.append(first.advance((0, 1, 2)))
        second.advance((0,))
        junk = [torch.full((1 << (10 + step % 12),), float("nan"), device="cuda") for _ in range(4)]
        del junk[::2]
        torch.cuda.empty_cache()
    assert torch.equal(torch.stack(taken), alone[0])


def program_tokens(program: Program) -> torch.Tensor:
    return torch.stack([program.advance((0, 1, 2)) for _ in range(40)])


def both_ways(model: nn.Module, **options: object) -> tuple[Program, Program]:
    """A program that runs everything eagerly, and one that captures."""
    eager, captured = (
        Program(read_spec(model, max_length=LENGTH), slots=ROWS, graphs=graphs, **options) for graphs in (False, True)
    )
    return eager, captured


def tensors_of(program: Program) -> tuple[torch.Tensor, ...]:
    return program.cache.keys + program.cache.values


def assert_prompts_come_out_the_same(eager: Program, captured: Program) -> None:
    """Bitwise: logits, cache and next tokens, while slots change hands between replays of one graph."""
    for round_, (length, slot) in enumerate(
        [(7, 0), (40, 4), (300, 1), (5, 2), (290, 0), (LENGTH, 3), (8, 4), (300, 1)]
    ):
        ids = [t % 100 for t in tokens(length, seed=round_)]
        for program in (eager, captured):
            if slot not in program.free_slots():
                program.free(slot)
        assert torch.equal(eager.prefill(slot, ids), captured.prefill(slot, ids))
        for ours, theirs in zip(tensors_of(eager), tensors_of(captured), strict=True):
            assert torch.equal(ours[:ROWS], theirs[:ROWS])
        if length < LENGTH:
            assert torch.equal(eager.advance((slot,)), captured.advance((slot,)))


@pytest.mark.parametrize("chunk", [2048, 128])
def test_a_replayed_prompt_equals_an_eager_one_bitwise(model, chunk):
    eager, captured = both_ways(model, chunk=chunk)
    assert_prompts_come_out_the_same(eager, captured)
    assert captured._prefill._first._graphs
    assert not eager._prefill._first._graphs


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "glm4"])
def test_a_replayed_prompt_of_any_family_equals_an_eager_one_bitwise(name):
    half = tiny(name, torch.bfloat16, max_position_embeddings=LENGTH).cuda()
    assert_prompts_come_out_the_same(*both_ways(half))


@pytest.mark.parametrize("number", ["_slot", "_last"])
def test_a_replay_in_a_wrong_slot_or_to_a_wrong_end_is_seen(model, number, monkeypatch):
    eager, captured = both_ways(model)
    first = captured._prefill._first
    usual = first._fill

    def fill(ids: torch.Tensor, bucket: int, slot: int) -> None:
        usual(ids, bucket, slot)
        getattr(first, number).copy_((getattr(first, number) - 1).clamp(min=0))

    monkeypatch.setattr(first, "_fill", fill)
    with pytest.raises(AssertionError):
        assert_prompts_come_out_the_same(eager, captured)


def test_a_prompt_does_not_wait_for_the_device(model):
    program = Program(read_spec(model, max_length=LENGTH), slots=2)
    for _ in range(2):  # the second finds the graph, and leaves pinned memory to use again
        program.prefill(0, tokens(300))
        program.free(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    program.prefill(1, tokens(300))
    assert not torch.cuda.current_stream().query()


def test_a_prompt_that_cannot_be_captured_runs_eagerly(model):
    eager, captured = both_ways(model)
    first = captured._prefill._first
    usual = first._forward

    def too_large(*arguments: torch.Tensor) -> torch.Tensor:
        answer = usual(*arguments)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("planted")
        return answer

    first._forward = too_large
    ids = [t % 100 for t in tokens(100)]
    stream = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="run without a CUDA graph, since capturing one failed: planted"):
        answer = captured.prefill(0, ids)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(answer, eager.prefill(0, ids))
    assert torch.equal(captured.prefill(1, ids), eager.prefill(1, ids))
    for active in ((0,), (1, 0)):
        assert torch.equal(eager.advance(active), captured.advance(active))


def test_graphs_of_prompts_hold_what_the_longest_takes(model):
    kept = Program(read_spec(model, max_length=2048), slots=1)  # the joined weights are there before and after
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    program = Program(read_spec(model, max_length=2048), slots=1)
    for length in (5, 100, 200, 500, 700, 1000, 1400, 2000, 700, 100):
        program.prefill(0, tokens(length))
        program.free(0)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert set(program._prefill._first._graphs) == {2048, 768, 128}
    assert torch.cuda.memory_reserved() - before <= program.cache.nbytes + 300 * 2**20
    kept.close()


def test_memory_is_the_cache_and_little_else(model):
    filled(model).close()  # the model's weights lie by themselves, whatever the tests before left
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    program = filled(model)
    for active in joining_and_leaving():
        program.advance(active)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= program.cache.nbytes + 300 * 2**20
