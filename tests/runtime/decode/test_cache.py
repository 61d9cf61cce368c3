from __future__ import annotations

import pytest
import torch

from flashnorm.errors import CapacityError
from flashnorm.runtime.decode import cache
from flashnorm.runtime.decode.cache import allocate, available_bytes, cache_bytes
from flashnorm.runtime.decode.reading import read_spec
from tests.runtime.decode.models import LENGTH, tiny


def test_the_size_is_stated_exactly():
    spec = read_spec(tiny("llama", torch.bfloat16), max_length=LENGTH)
    assert (
        cache_bytes(spec, 4, 50) == 2 * 3 * 4 * 2 * 50 * 16 * 2
    )  # k and v, layers, slots, heads, tokens, width, bytes
    assert allocate(spec, 4, 50).nbytes == cache_bytes(spec, 4, 50)


def test_a_cache_beyond_free_memory_is_refused_before_it_is_allocated(monkeypatch):
    spec = read_spec(tiny("llama"), max_length=LENGTH)
    monkeypatch.setattr(cache, "available_bytes", lambda _device: cache_bytes(spec, 4, 50) - 1)
    monkeypatch.setattr(torch, "zeros", lambda *_a, **_k: pytest.fail("allocated"))
    with pytest.raises(CapacityError, match=r"4 sequences of 50 tokens takes .* free on cpu; ask for fewer"):
        allocate(spec, 4, 50)


def test_free_memory_is_known_here():
    there = available_bytes(torch.device("cpu"))
    assert there is None or there > 0
    assert available_bytes(torch.device("meta")) is None
