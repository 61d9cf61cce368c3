"""`python -m tests.centering`: run every causal architecture, write docs/center.json and the table of it."""

from __future__ import annotations

import sys

import torch
import transformers

from tests import zoo
from tests.centering.examine import Outcome, examine
from tests.centering.record import Record, write_documents


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    reasons = zoo.build_report("causal")
    outcomes: list[Outcome] = []
    for model_type in (name for name, reason in reasons.items() if reason == "ok"):
        outcomes.append(examine(model_type))
        row = outcomes[-1]
        print(
            f"{model_type:28s} centered {len(row.centered)} untied {len(row.untied)} no {len(row.no)} "
            f"{row.error:.1e} {row.error_small:.1e} {row.over_cautious} {row.refused}",
            file=sys.stderr,
            flush=True,
        )
    unbuilt = {name: reason for name, reason in reasons.items() if reason != "ok"}
    write_documents(Record(transformers.__version__, outcomes, unbuilt))


if __name__ == "__main__":
    main()
