"""`flashnorm audit --all-architectures`: bounded in time, and no crash loses the others."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flashnorm.cli.audit_all import audit_types, summary_table
from flashnorm.cli.main import main
from flashnorm.errors import TracingError
from flashnorm.sites import architectures
from flashnorm.sites.architectures import causal_types, short_model


def _work(name: str, untie: bool) -> dict[str, Any]:
    if name == "slow":
        time.sleep(60)
    if name == "crashes":
        os._exit(11)
    if name == "refused":
        raise TracingError("no way through")
    if name == "bug":
        raise KeyError("x")
    return {"norms": 1, "rows": [], "untie": untie}


def test_what_is_slow_or_crashes_loses_nothing_else() -> None:
    told: list[str] = []
    names = ["one", "slow", "crashes", "refused", "bug", "two"]
    started = time.monotonic()
    tables = audit_types(names, 2.0, True, told.append, _work)
    assert time.monotonic() - started < 20
    assert [table["model_type"] for table in tables] == names
    assert sorted(told) == sorted(names)
    errors = {table["model_type"]: table.get("error", "") for table in tables}
    assert errors == {
        "one": "",
        "slow": "it took longer than 2 seconds",
        "crashes": "its process ended with status 11",
        "refused": "no way through",
        "bug": "KeyError: 'x'",
        "two": "",
    }
    assert tables[0]["untie"]


def test_configs_are_cut_to_a_layer_of_each_kind() -> None:
    assert short_model("llama").config.num_hidden_layers == 2
    gemma3 = short_model("gemma3_text").config
    assert sorted(gemma3.layer_types) == ["full_attention", "sliding_attention"]
    assert gemma3.num_hidden_layers == 2
    assert gemma3.architectures == ["Gemma3ForCausalLM"]
    assert len(causal_types()) > 100


def test_lists_of_the_numbers_of_layers_are_cut_with_the_layers() -> None:
    hybrid = short_model("zamba2").config
    assert [hybrid.layer_types[n] for n in hybrid.hybrid_layer_ids] == ["hybrid"]
    assert len(hybrid.layer_types) == 2
    routed = short_model("llama4_text").config
    assert routed.moe_layers == [0, 1]  # a number for each layer is no kind of its own for each
    assert sorted(routed.layer_types) == ["chunked_attention", "full_attention"]


@pytest.mark.skipif("flint" not in CONFIG_MAPPING, reason="this Transformers does not have it")
def test_a_list_that_leaves_layers_out_keeps_both_kinds() -> None:
    sparse = short_model("flint").config
    assert sparse.mlp_only_layers == [0]  # and others, which are not: before, both layers left were of one kind
    assert sparse.num_hidden_layers == 3


@pytest.mark.skipif("hrm_text" not in CONFIG_MAPPING, reason="this Transformers does not have it")
def test_a_list_of_one_small_number_is_of_no_layer() -> None:
    assert short_model("hrm_text").config.L_bp_cycles == [2]


def test_a_model_that_reads_a_part_of_its_types_config_gets_that_part() -> None:
    assert short_model("emu3").config.model_type == "emu3_text_model"


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command(as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(architectures, "causal_types", lambda: ["gpt_neox", "no-such-type"])
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "--all-architectures", "--quiet", *(["--json"] if as_json else [])])
    assert not stopped.value.code
    out = capsys.readouterr().out
    if not as_json:
        assert "gpt_neox" in out
        assert "no-such-type" in out
        return
    neox, none = json.loads(out)["architectures"]
    assert none["error"].startswith("no-such-type has no default config")
    rows = {row["norm"]: row for row in neox["rows"]}
    norm = rows["gpt_neox.layers.0-1.input_layernorm"]
    assert norm["foldable"] == norm["centerable"] == {"verdict": "yes", "reason": ""}
    assert norm["deferrable"]["verdict"] == "centered"
    assert norm["cancellable"]["verdict"] == "no"
    assert neox["norms"] == 5


def test_a_folder_and_all_architectures_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["folder", "--all-architectures"]):
        with pytest.raises(SystemExit) as stopped:
            main(["audit", *arguments])
        assert stopped.value.code == 2
        assert "give either a checkpoint folder or --all-architectures" in capsys.readouterr().err


def test_the_summary_has_a_row_for_each() -> None:
    assert summary_table(audit_types(["one", "bug"], 5.0, work=_work)).row_count == 2
