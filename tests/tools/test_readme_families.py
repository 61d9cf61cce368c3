"""The README's table of families says what an audit of each finds."""

from __future__ import annotations

import pytest

import flashnorm
from tests import zoo
from tools.readme_example import README

LAYER = {"input_layernorm", "post_attention_layernorm"}
SANDWICH = {"post_attention_layernorm", "post_feedforward_layernorm"}
QK = {"q_norm", "k_norm"}
# Row of the table -> model type -> the norms that are folded, and those that are left.
ROWS: dict[str, dict[str, tuple[set[str], set[str]]]] = {
    "Llama, Mistral, Qwen2, Qwen3, Phi-3, Granite, Mixtral, Qwen3-MoE, GPT-OSS": {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "phi3", "granite", "mixtral", "gpt_oss"), (LAYER | {"norm"}, set())
        ),
        **dict.fromkeys(("qwen3", "qwen3_moe"), (LAYER | {"norm"}, QK)),
    },
    "Gemma 2, Gemma 3": {
        "gemma2": ({"input_layernorm", "pre_feedforward_layernorm"}, SANDWICH | {"norm"}),
        "gemma3_text": ({"input_layernorm", "pre_feedforward_layernorm"}, SANDWICH | QK | {"norm"}),
    },
    "Gemma 3n": {
        "gemma3n_text": (
            {"pre_feedforward_layernorm", "router_norm"},
            SANDWICH
            | QK
            | {"input_layernorm", "norm", "per_layer_projection_norm", "post_laurel_norm", "post_per_layer_input_norm"},
        )
    },
    "OLMo 2": {"olmo2": ({"norm"}, SANDWICH | QK)},
    "DeepSeek V3": {"deepseek_v3": (LAYER | {"norm", "q_a_layernorm", "kv_a_layernorm"}, set())},
    "GPT-2, Phi and other LayerNorm models": {
        "gpt2": ({"ln_1", "ln_2"}, {"ln_f"}),
        "phi": ({"input_layernorm", "final_layernorm"}, set()),
    },
}
CASES = [(row, model_type) for row, types in ROWS.items() for model_type in types]


@pytest.mark.parametrize(("row", "model_type"), CASES)
def test_a_row_says_what_an_audit_finds(row: str, model_type: str) -> None:
    assert f"\n| {row} |" in README.read_text()
    report = flashnorm.audit(zoo.tiny_model("causal", model_type))
    folded, left = ({site.norm.rpartition(".")[2] for site in sites} for sites in (report.foldable, report.blocked))
    assert (folded, left) == ROWS[row][model_type]


def test_every_row_is_checked() -> None:
    table = README.read_text().partition("| family | folded | left |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()] == list(ROWS)
