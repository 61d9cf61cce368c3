"""`python -m tests.coverage [FAMILY ...]`: run every architecture, write docs/coverage.json and .md and the README."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests import zoo
from tests.coverage.examine import Outcome, examine
from tests.coverage.record import FAMILIES, Record, merged, write_documents


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    outcomes: dict[str, list[Outcome]] = {}
    unbuilt: dict[str, dict[str, str]] = {}
    for family in families or list(FAMILIES):
        reasons = zoo.build_report(family)
        unbuilt[family] = {name: reason for name, reason in reasons.items() if reason != "ok"}
        outcomes[family] = []
        for model_type in (name for name, reason in reasons.items() if reason == "ok"):
            with tempfile.TemporaryDirectory() as folder:
                outcome = examine(family, model_type, zoo.tiny_model(family, model_type), Path(folder))
            print(
                f"{family:10s} {model_type:28s} {outcome.folded}/{outcome.norms} {outcome.error:.1e}", file=sys.stderr
            )
            outcomes[family].append(outcome)
    write_documents(merged(Record(transformers.__version__, outcomes, unbuilt)))


if __name__ == "__main__":
    main(sys.argv[1:])
