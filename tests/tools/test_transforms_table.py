"""The page of all architectures is generated from its record, and the record is what the audit says now."""

from __future__ import annotations

import pytest
import transformers

from flashnorm.cli.audit_all import audit_type
from flashnorm.sites.architectures import causal_types
from tools.transforms_table import COLUMNS, TABLE, full_table, read_record, shortened

RECORD = {
    "transformers": "1.0",
    "architectures": [
        {
            "model_type": "a",
            "norms": 2,
            "rows": [
                {
                    "norm": "layers.0-1.norm",
                    "convention": "RMSNorm w, eps 1e-05",
                    "foldable": {"verdict": "no", "reason": "it is added [add, layers.0-1, x.py:3]; read by a.b.c"},
                    "deferrable": {"verdict": "yes", "reason": ""},
                    "cancellable": {"verdict": "partial", "reason": "layers.0-1.v: it is added [y.py:5]"},
                    "centerable": {"verdict": "no", "reason": "it subtracts no mean"},
                }
            ],
        },
        {"model_type": "b", "error": "it took\nlonger"},
    ],
}


def test_every_verdict_and_every_reason_is_there() -> None:
    page = full_table({**RECORD, "architectures": [shortened(found) for found in RECORD["architectures"]]})
    row = "| a | `layers.0-1.norm` | RMSNorm w, eps 1e-05 | no [1] [2] | yes | partial [3] | - |"
    assert row in page.splitlines()
    assert "1. it is added\n2. read by …\n3. …: it is added\n" in page
    assert "- b: it took longer" in page
    assert "1 of 2 could be audited" in page


def test_the_page_is_generated_from_the_record() -> None:
    assert TABLE.read_text() == full_table(read_record())


def test_the_record_is_of_every_type_and_complete() -> None:
    record = read_record()
    if record["transformers"] == transformers.__version__:
        assert [found["model_type"] for found in record["architectures"]] == causal_types()
    audited = [found for found in record["architectures"] if "rows" in found]
    assert len(audited) > 0.85 * len(record["architectures"])
    for found in audited:
        verdicts = [row[key] for row in found["rows"] for key in COLUMNS]
        assert all(verdict["verdict"] in ("yes", "partial", "centered", "no") for verdict in verdicts)
        assert all(bool(verdict["reason"]) == (verdict["verdict"] != "yes") for verdict in verdicts)


@pytest.mark.parametrize("model_type", ["gpt2"])
def test_the_record_holds(model_type: str) -> None:
    record = read_record()
    if record["transformers"] != transformers.__version__:
        pytest.skip(f"the record is of Transformers {record['transformers']}")
    (then,) = [found for found in record["architectures"] if found["model_type"] == model_type]
    assert shortened({"model_type": model_type, **audit_type(model_type, False)}) == then
