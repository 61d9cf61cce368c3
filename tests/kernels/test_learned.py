from __future__ import annotations

import json

import pytest
import torch

from flashnorm.kernels import dispatch, learned
from flashnorm.kernels.configs import Gemv, NormLinear, to_dict
from flashnorm.kernels.dispatch import Problem

HOPPER = torch.device("cuda", 0)


def entry(m, config, k=4096, n=6144, **more):
    return {"m": m, "k": k, "n": n, "config": to_dict(config), **more}


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """Nothing runs on it, but it can be asked for its name."""
    monkeypatch.setenv("FLASHNORM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU / of ours")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "triton_runs", lambda device: True)
    dispatch.forget_tables()
    yield HOPPER
    dispatch.forget_tables()


def chosen(m):
    return dispatch.choose(Problem(m, 4096, 6144, torch.bfloat16, gained=False, addressable=True, hopper=True), HOPPER)


def test_what_was_found_here_goes_before_what_is_shipped(hopper):
    shipped = chosen(1), chosen(16)
    learned.write(learned.table_path(hopper), [entry(1, Gemv(8, 512, 2))], {})
    dispatch.forget_tables()
    assert (chosen(1), chosen(16)) == (Gemv(8, 512, 2), shipped[1])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"entries": [{"m": 1}]}',
        '{"entries": [{"m": 1, "k": 1, "n": 1, "config": {"family": "x"}}]}',
    ],
)
def test_a_damaged_table_is_left_out_with_a_warning(hopper, text):
    shipped = chosen(1)
    path = learned.table_path(hopper)
    path.parent.mkdir()
    path.write_text(text)
    dispatch.forget_tables()
    with pytest.warns(UserWarning, match="no table of configurations"):
        assert chosen(1) == shipped


def test_the_file_is_of_one_kind_of_gpu_and_one_set_of_versions(hopper, monkeypatch):
    path = learned.table_path(hopper)
    assert path.name.startswith("A-GPU-of-ours-sm90-torch-")
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert learned.table_path(hopper) != path


def test_writing_keeps_other_entries_and_replaces_its_own(tmp_path):
    path = tmp_path / "tables" / "t.json"
    learned.write(path, [entry(1, Gemv()), entry(16, NormLinear())], {"device": "old"})
    learned.write(path, [entry(1, Gemv(8)), entry(1, Gemv(4), gated=True)], {"device": "new"})
    table = learned.read(path)
    assert table[4096, 6144, False] == {1: Gemv(8), 16: NormLinear()}
    assert table[4096, 6144, True] == {1: Gemv(4)}
    assert json.loads(path.read_text())["device"] == "new"
    assert [file.name for file in path.parent.iterdir()] == ["t.json"]


def test_there_need_not_be_one(tmp_path):
    assert learned.read(tmp_path / "none.json") == {}
