from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.errors import CapacityError, Refusal
from flashnorm.passes.fold import fold
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.sampling import Sampling
from tests.runtime.decode.models import LENGTH, SUPPORTED, VOCABULARY, tiny, tokens

PROMPT = 20
# fp32 throughout: two orders of the same additions; logits are sums of some hundred products, three layers deep.
CLOSE = 1e-5


def program_of(model: nn.Module, **options: object) -> Program:
    return Program(read_spec(model, max_length=LENGTH), **{"slots": 3, **options})


@torch.no_grad()
def uncached(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits (tokens, vocabulary) of the stock model without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).norm() <= CLOSE * expected.norm()


@pytest.mark.parametrize("name", SUPPORTED)
def test_cached_logits_are_the_stock_models_uncached_ones_at_every_step(name):
    model, ids = tiny(name), tokens(LENGTH)
    expected = uncached(model, ids)
    program = program_of(model)
    assert_close(program.prefill(1, ids[:PROMPT]), expected[PROMPT - 1])
    for at in range(PROMPT, LENGTH):  # 76 steps
        assert_close(program.decode({1: ids[at]})[0], expected[at])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_long_prompt_in_chunks(name):
    model, ids = tiny(name), tokens(LENGTH)
    program = program_of(model, chunk=7)
    assert_close(program.prefill(0, ids), uncached(model, ids)[-1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_folded_model(name):
    model, ids = tiny(name), tokens(40)
    expected = uncached(model, ids)
    fold(model)
    program = program_of(model)
    program.prefill(0, ids[:PROMPT])
    assert (program.decode({0: ids[PROMPT]})[0] - expected[PROMPT]).norm() <= 1e-4 * expected[PROMPT].norm()


def test_ragged_batches_join_and_leave_between_steps():
    model = tiny("gemma3")
    program = program_of(model)
    rows = {slot: tokens(LENGTH, seed=slot) for slot in range(3)}
    expected = {slot: uncached(model, ids) for slot, ids in rows.items()}
    used = {0: 5, 1: 17, 2: 9}
    for slot, length in used.items():
        program.prefill(slot, rows[slot][:length])
    for active in [(0,), (1, 0), (2, 1, 0), (2,), (0, 2), *[(0, 1, 2)] * 60]:
        logits = program.decode({slot: rows[slot][used[slot]] for slot in active})
        for row, slot in enumerate(active):
            assert_close(logits[row], expected[slot][used[slot]])
            used[slot] += 1
    assert [program.length(slot) for slot in range(3)] == list(used.values())


def test_a_sequence_comes_out_the_same_alone_and_in_a_batch():
    model = tiny("qwen2")
    alone, full = program_of(model), program_of(model)
    for slot in range(3):
        full.prefill(slot, tokens(4 + 3 * slot, seed=slot))
    alone.prefill(0, tokens(7, seed=1))
    for token in tokens(10):
        together = full.decode({0: 5, 1: token, 2: 7})[1]
        assert_close(together, alone.decode({0: token})[0])


def test_a_freed_slot_remembers_nothing():
    model, ids = tiny("mistral"), tokens(30, seed=2)
    program = program_of(model, slots=1)
    program.prefill(0, tokens(60, seed=3))
    for cache in (*program.cache.keys, *program.cache.values):
        cache.fill_(float("nan"))  # whatever lies beyond the new sequence must not be read
    program.free(0)
    expected = uncached(model, ids)
    assert_close(program.prefill(0, ids[:10]), expected[9])
    for at in range(10, 30):
        assert_close(program.decode({0: ids[at]})[0], expected[at])


def test_later_tokens_do_not_change_earlier_logits():
    model, ids = tiny("llama"), tokens(30)
    program = program_of(model)
    first = program.prefill(0, ids[:10])
    program.prefill(1, ids[:10] + tokens(20, seed=9))
    program.free(0)
    assert torch.equal(program.prefill(0, ids[:10]), first)


def test_a_second_program_does_not_disturb_the_first():
    left, right = tiny("llama"), tiny("qwen3")
    ids = tokens(40)
    expected = uncached(left, ids), uncached(right, ids)
    programs = program_of(left), program_of(right), program_of(left)
    for program in programs:
        program.prefill(0, ids[:PROMPT])
    for at in range(PROMPT, 40):
        for program, logits in zip(programs, (*expected, expected[0]), strict=True):
            assert_close(program.decode({0: ids[at]})[0], logits[at])


def test_a_step_that_reads_the_previous_steps_keys_is_seen():
    """The planted fault: the cache lags by one step. The comparison above must tell."""
    model, ids = tiny("llama"), tokens(40)
    expected = uncached(model, ids)
    program = program_of(model)
    program.prefill(0, ids[:PROMPT])
    program.decode({0: ids[PROMPT]})
    program.cache.keys[1][0, :, PROMPT] = program.cache.keys[1][0, :, PROMPT - 1]
    with pytest.raises(AssertionError):
        assert_close(program.decode({0: ids[PROMPT + 1]})[0], expected[PROMPT + 1])


@torch.no_grad()
def test_greedy_tokens_are_those_of_generate():
    model = tiny("llama_tied")
    prompts = [tokens(6, seed=1), tokens(11, seed=2)]
    program = program_of(model)
    for slot, prompt in enumerate(prompts):
        program.prefill(slot, prompt)
    chosen = [program.chosen((0, 1))] + [program.advance((0, 1)) for _ in range(19)]
    assert torch.equal(program.chosen((1, 0)), chosen[-1].flip(0))
    for slot, prompt in enumerate(prompts):
        stock = model.generate(torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
        # generate() forbids the end of sequence for min_new_tokens; the program has no such rule
        if not any(int(c[slot]) == 2 for c in chosen):
            assert stock[0, len(prompt) :].tolist() == [int(c[slot]) for c in chosen]


def test_sampled_tokens_do_not_depend_on_the_company():
    model = tiny("llama")
    settings = Sampling(temperature=1.5, top_k=50, top_p=0.95, repetition_penalty=1.3, seed=7)
    alone, full = program_of(model), program_of(model)
    alone.prefill(2, tokens(9), settings)
    full.prefill(0, tokens(9), settings)
    full.prefill(1, tokens(12, seed=4), Sampling(temperature=1.0, seed=1))
    full.prefill(2, tokens(5, seed=5))
    single = [int(alone.chosen((2,)))] + [int(alone.advance((2,))) for _ in range(30)]
    batch = [int(full.chosen((0,)))] + [int(full.advance((2, 0, 1))[1]) for _ in range(30)]
    assert single == batch
    assert len(set(single)) > 5


def test_half_precision_follows_fp32():
    """Both roundings are of bf16: the program's is not worse than stock's by more than the noise of 61 positions."""
    exact, model, ids = tiny("llama"), tiny("llama", torch.bfloat16), tokens(LENGTH)
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    expected, stock = uncached(exact, ids), uncached(model, ids).float()
    program = program_of(model)
    program.prefill(0, ids[:PROMPT])
    mine = torch.stack([program.decode({0: ids[at]})[0] for at in range(PROMPT, LENGTH)])
    assert (mine - expected[PROMPT:]).norm() <= 1.05 * (stock[PROMPT:] - expected[PROMPT:]).norm()


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_and_gradients_may_come_and_go(first):
    ids = tokens(12)
    model = tiny("llama")
    expected = uncached(model, ids)
    with torch.inference_mode(first):
        program = program_of(model)
        program.prefill(0, ids[:5])
        program.decode({0: ids[5]})
    for at in range(6, 12):
        with torch.inference_mode(at % 2 == first):
            logits = program.decode({0: ids[at]})[0]
            assert_close(logits, expected[at])
            assert not logits.requires_grad
            program.advance((0,))
        program.free(0)
        program.prefill(0, ids[: at + 1])


def test_capacity_is_refused_with_nothing_changed():
    program = program_of(tiny("llama"), slots=2, max_length=12)
    assert (program.slots, program.max_length, program.free_slots()) == (2, 12, (0, 1))
    with pytest.raises(CapacityError, match="one row of 1 to 12 tokens"):
        program.prefill(0, tokens(13))
    with pytest.raises(CapacityError, match="one row of 1 to 12"):
        program.prefill(0, [])
    with pytest.raises(CapacityError, match="slot 5 does not exist; there are 2"):
        program.prefill(5, tokens(3))
    with pytest.raises(CapacityError, match="slot 1 holds no sequence"):
        program.decode({1: 3})
    program.prefill(0, tokens(12))
    with pytest.raises(CapacityError, match="slot 0 holds a sequence"):
        program.prefill(0, tokens(3))
    with pytest.raises(CapacityError, match="slot 0 is full"):
        program.advance((0,))
    program.prefill(1, tokens(3))
    with pytest.raises(CapacityError, match="slot 0 is full"):
        program.decode({1: 3, 0: 3})
    with pytest.raises(CapacityError, match="each once"):
        program.advance((1, 1))
    with pytest.raises(Refusal, match=f"the vocabulary has {VOCABULARY}"):
        program.decode({1: VOCABULARY})
    assert (program.length(0), program.length(1)) == (12, 3)
    program.free(0)
    assert program.free_slots() == (0,)
    with pytest.raises(CapacityError, match="holds no sequence"):
        program.free(0)


WRONG = {"a half": 1.5, "a word": "1", "nothing": None}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_slots_and_tokens_that_are_no_whole_numbers_are_refused_with_nothing_changed(wrong):
    program = program_of(tiny("llama"))
    program.prefill(0, tokens(3))
    for ask in (
        lambda: program.prefill(wrong, tokens(3)),
        lambda: program.prefill(1, [3, wrong]),
        lambda: program.decode({wrong: 3}),
        lambda: program.decode({0: wrong}),
        lambda: program.advance([wrong]),
        lambda: program.free(wrong),
        lambda: program.length(wrong),
    ):
        with pytest.raises(Refusal, match="whole number"):
            ask()
    assert (program.free_slots(), program.length(0)) == ((1, 2), 3)


def test_slots_and_tokens_may_be_numbers_of_any_kind():
    program = program_of(tiny("llama"))
    expected = program.prefill(0, tokens(3))
    assert torch.equal(program.prefill(torch.tensor(1), torch.tensor(tokens(3), dtype=torch.int32)), expected)
    plain = program.decode({0: 5})
    assert torch.equal(program.decode({torch.tensor(1): torch.tensor(5)}), plain)
    assert program.advance(torch.tensor([1])).tolist() == program.advance([0]).tolist()
    assert (program.length(0), program.length(1)) == (5, 5)


def test_more_than_fits_is_refused_before_it_is_made():
    model = tiny("llama")
    with pytest.raises(CapacityError, match="tables for 1000000000000 positions take"):
        read_spec(model, max_length=10**12)
    spec = read_spec(model, max_length=LENGTH)
    with pytest.raises(CapacityError, match="a cache of 1000000000001 sequences"):
        Program(spec, slots=10**12)


def test_a_closed_program_says_so():
    program = program_of(tiny("llama"))
    program.prefill(0, tokens(3))
    program.close()
    for ask in (lambda: program.prefill(1, tokens(3)), lambda: program.advance([0]), lambda: program.decode({0: 3})):
        with pytest.raises(Refusal, match="closed"):
            ask()


def test_sizes_that_make_no_sense():
    spec = read_spec(tiny("llama"), max_length=LENGTH)
    for options in ({"slots": 0}, {"max_length": 0}, {"max_length": LENGTH + 1}):
        with pytest.raises(Refusal, match="for which the model was read"):
            Program(spec, **options)


def test_close_gives_the_model_its_weights_back():
    model = tiny("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    program = program_of(model)
    attention = model.model.layers[0].self_attn
    q, k = attention.q_proj.weight, attention.k_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert torch.equal(uncached(model, tokens(9)), uncached(tiny("llama"), tokens(9)))
    program.close()
    assert q is attention.q_proj.weight
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
