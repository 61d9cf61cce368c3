from __future__ import annotations

from flashnorm.verify.steps import Steps


def test_the_second_model_is_timed_by_the_first() -> None:
    now, lines = [0.0], list[str]()
    steps = Steps(lines.append, lambda: now[0])
    for step, seconds in (("load", 10), ("run", 30)):
        steps(f"a: {step}")
        now[0] += seconds
    steps.second_model()
    for step in ("load", "run", "more"):
        steps(f"b: {step}")
        now[0] += 20
    assert lines == [
        "a: load (0 s)",
        "a: run (10 s)",
        "b: load (40 s, 50%, about 40 s left)",
        "b: run (60 s, 67%, about 30 s left)",
        "b: more (80 s)",
    ]
