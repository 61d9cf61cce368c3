from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from flashnorm.kernels import w8a8_dispatch
from flashnorm.kernels.w8a8_candidates import candidates
from flashnorm.kernels.w8a8_configs import CodesGemv, CodesSplitK, Library, Reference, from_dict, to_dict
from flashnorm.kernels.w8a8_dispatch import CODES, HOPPER, Problem, choose, fits, parse, problem_of

FLOAT8 = torch.float8_e4m3fn
PROBLEM = Problem(1, 5120, 7168, torch.bfloat16, FLOAT8, addressable=True, capability=HOPPER)  # no table has it
INT8 = {"codes": torch.int8}


def _way(**changed: object) -> type:
    return type(choose(dataclasses.replace(PROBLEM, **changed)))


@pytest.mark.parametrize("codes", CODES.values())
@pytest.mark.parametrize(
    ("m", "way"),
    [(1, CodesGemv), (2, CodesSplitK), (5, CodesSplitK), (64, CodesSplitK), (65, Library), (4096, Library)],
)
def test_rows_decide_on_hopper(m, way, codes):
    assert _way(m=m, codes=codes) is way


@pytest.mark.parametrize("codes", CODES.values())
def test_what_the_matrix_units_cannot_address_goes_another_way(codes):
    for changed in ({"addressable": False}, {"k": 77}):
        assert _way(m=8, codes=codes, **changed) is CodesGemv
        assert _way(m=9, codes=codes, **changed) is Reference
    assert _way(m=9, n=77, codes=codes) is CodesSplitK
    assert _way(m=65, n=77, codes=codes) is Reference
    assert _way(m=1, k=1 << 16, codes=codes) is Reference


@pytest.mark.parametrize(
    ("capability", "changed", "few", "more"),
    [
        ((0, 0), {}, Reference, Reference),  # no GPU
        ((0, 0), INT8, Reference, Reference),
        ((8, 0), {}, Reference, Reference),
        ((8, 0), INT8, CodesGemv, Library),
        ((8, 9), {}, CodesGemv, Library),
        ((8, 9), {"dtype": torch.float32}, CodesGemv, Reference),
        ((9, 0), {"dtype": torch.float32}, CodesGemv, CodesSplitK),
        ((10, 0), {}, CodesGemv, Library),
    ],
)
def test_capability_decides_what_can_run(capability, changed, few, more):
    assert _way(m=1, capability=capability, **changed) is few
    assert _way(m=4, capability=capability, **changed) is (more if capability == HOPPER else few)
    assert _way(m=16, capability=capability, **changed) is more


def test_a_table_comes_first_where_it_fits(monkeypatch):
    listed = CodesGemv(8, 8), CodesSplitK(128, 256, 3)
    entries = [
        {"m": m, "k": 5120, "n": 7168, "codes": "e4m3", "config": to_dict(config)}
        for m, config in zip((2, 32), listed, strict=True)
    ]
    table = parse(json.dumps({"entries": entries}))
    monkeypatch.setattr(w8a8_dispatch, "_shipped", lambda capability: table)
    assert choose(PROBLEM) == choose(dataclasses.replace(PROBLEM, m=2)) == listed[0]
    assert choose(dataclasses.replace(PROBLEM, m=3)) == choose(dataclasses.replace(PROBLEM, m=32)) == listed[1]
    assert _way(m=33) is CodesSplitK
    assert choose(dataclasses.replace(PROBLEM, m=33)) not in listed
    assert choose(dataclasses.replace(PROBLEM, m=3, addressable=False)) not in listed
    assert choose(dataclasses.replace(PROBLEM, codes=torch.int8)) not in listed


def test_all_that_is_shipped_can_run():
    for (codes, k, n), rows in w8a8_dispatch._shipped(HOPPER).items():
        for m, config in rows.items():
            assert fits(config, dataclasses.replace(PROBLEM, m=m, k=k, n=n, codes=CODES[codes]))
    assert w8a8_dispatch._shipped((8, 0)) == {}


@pytest.mark.parametrize("m", [1, 2, 8, 16, 64])
@pytest.mark.parametrize(("k", "n"), [(576, 960), (4096, 6144)])
def test_every_candidate_can_run_and_none_comes_twice(m, k, n):
    found = candidates(m, k, n)
    assert len(found) == len(set(found)) > 1
    assert all(fits(config, dataclasses.replace(PROBLEM, m=m, k=k, n=n)) for config in found)
    assert [from_dict(to_dict(config)) for config in found] == found


def test_the_rule_s_programs_hold_a_row():
    """Up to 64 values of x and 128 codes of the weight a thread."""
    for k in (64, 576, 4096, 5120, 8192, 32768):
        config = w8a8_dispatch.matrix_vector(k)
        values = (1 << (k - 1).bit_length()) // (32 * config.warps)
        assert config.warps in (1, 2, 4, 8, 16)
        assert values <= 64
        assert values * config.block_n <= 128


def test_the_problem_is_read_off_the_operands():
    x, weight = torch.ones(3, 64), torch.ones(48, 64).to(FLOAT8)
    found = problem_of(x, weight)
    assert (found.m, found.k, found.n, found.dtype, found.codes) == (3, 64, 48, torch.float32, FLOAT8)
    assert found.addressable
    assert not problem_of(x, torch.ones(48, 65).to(FLOAT8)[:, :64]).addressable
    assert found.capability == (0, 0)
    assert choose(found) == Reference()
