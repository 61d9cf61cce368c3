"""`python -m tests.zoo causal [type ...]`: prints which types of a family the zoo can build."""

from __future__ import annotations

import sys
import time

from tests.zoo.families import model_types
from tests.zoo.report import state_of


def main(family: str, *only: str) -> None:
    """Prints one line per model type: its state and the seconds it took."""
    states = []
    for model_type in only or model_types(family):
        start = time.perf_counter()
        states.append(state_of(family, model_type))
        print(f"{model_type:28} {time.perf_counter() - start:5.2f}s  {states[-1]}", flush=True)
    print(f"{states.count('ok')} of {len(states)} ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
