from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor

import flashnorm
from flashnorm.errors import CapacityError, Refusal, Unsupported
from flashnorm.runtime import level_two
from tests.runtime.small import bits, llama, prompt, same_bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model():
    return flashnorm.accelerate(llama(), level=2, max_batch=2, max_length=64)


def test_it_generates_the_stock_models_tokens(model):
    assert torch.equal(model.generate(prompt(), **GREEDY), llama().generate(prompt(), **GREEDY))


def test_the_program_is_what_runs(model, monkeypatch):
    steps = []
    unchanged = model.slots.advance
    monkeypatch.setattr(model.slots, "advance", lambda active: steps.append(active) or unchanged(active))
    decoded = model.slots.decode
    monkeypatch.setattr(model.slots, "decode", lambda tokens: steps.append(tokens) or decoded(tokens))
    model.generate(prompt(), **GREEDY)
    assert len(steps) == GREEDY["max_new_tokens"] - 1


def test_what_the_program_does_not_know_runs_on_level_one_and_says_so(model):
    with pytest.warns(UserWarning, match="num_beams"):
        out = model.generate(prompt(), **GREEDY, num_beams=2)
    assert torch.equal(out, llama().generate(prompt(), **GREEDY, num_beams=2))


def test_the_report_states_the_cache(model):
    assert model.acceleration.level == 2
    assert "2 sequences of 64 tokens" in str(model.acceleration)


def test_unaccelerate_restores_everything(model):
    restored = model.unaccelerate()
    assert same_bits(restored, bits(llama()))
    assert not {"generate", "slots", "_apply", "load_state_dict"} & set(vars(restored))
    assert type(restored).__name__ == type(llama()).__name__
    restored.to(torch.float64)
    copy.deepcopy(restored)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.load_state_dict(llama(seed=1).state_dict()),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_what_would_part_the_program_from_its_weights_is_refused(model, change):
    with pytest.raises(Refusal, match=r"unaccelerate\(\) first"):
        change(model)
    assert torch.equal(model.generate(prompt(), **GREEDY), llama().generate(prompt(), **GREEDY))


def test_a_model_that_is_no_plain_decoder_stays_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    with pytest.raises(Unsupported, match="generates no text"):
        flashnorm.accelerate(model, level=2)
    assert not hasattr(model, "acceleration")


def test_a_cache_that_does_not_fit_leaves_the_model_stock(monkeypatch):
    def full(*args, **options):
        raise CapacityError("the cache does not fit")

    monkeypatch.setattr(level_two, "Program", full)
    model = llama()
    with pytest.raises(CapacityError):
        flashnorm.accelerate(model, level=2)
    assert not hasattr(model, "acceleration")
    assert same_bits(model, bits(llama()))


def test_a_sequence_beyond_the_length_is_refused_before_it_runs(model):
    with pytest.raises(CapacityError):
        model.generate(prompt(), **{**GREEDY, "max_new_tokens": 100, "min_new_tokens": 100})
    assert model.slots.free_slots() == (0, 1)


def test_arguments_by_position_as_in_transformers(model):
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    processors = LogitsProcessorList([MinLengthLogitsProcessor(11, 2)])
    assert torch.equal(model.generate(prompt(), config), llama().generate(prompt(), config))
    with pytest.warns(UserWarning, match="cannot honour: logits_processor"):
        answer = model.generate(prompt(), config, processors)
    assert torch.equal(answer, llama().generate(prompt(), config, processors))
    with pytest.raises(TypeError, match="multiple values"):
        model.generate(prompt(), inputs=prompt())


def test_calls_on_several_threads_wait_for_each_other(model):
    """Two rows each, and two slots in all; without waiting, one call would free or take the other's."""
    expected = llama().generate(prompt(), **GREEDY)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: model.generate(prompt(), **GREEDY), range(8)))
    assert all(torch.equal(answer, expected) for answer in answers)


def test_a_streamer_may_generate(model):
    class Nested:
        answer = None

        def put(self, value):
            if self.answer is None:
                self.answer = model.generate(prompt()[:1], **GREEDY)

        def end(self):
            pass

    streamer, expected = Nested(), llama().generate(prompt()[:1], **GREEDY)
    assert torch.equal(model.generate(prompt()[:1], streamer=streamer, **GREEDY), expected)
    assert torch.equal(streamer.answer, expected)


def test_what_is_left_of_it_afterwards_cannot_be_used(model):
    slots, unaccelerate = model.slots, model.unaccelerate
    unaccelerate()
    with pytest.raises(Refusal, match="closed, since its model was unaccelerated"):
        slots.prefill(0, [3])
    with pytest.raises(Refusal, match="not accelerated any more"):
        unaccelerate()
