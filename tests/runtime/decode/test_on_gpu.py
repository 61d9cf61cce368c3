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
    usual = decode_step.settings_for
    monkeypatch.setattr(decode_step, "settings_for", lambda shape: replace(usual(shape), timed=True))
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
