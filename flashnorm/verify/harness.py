"""The lm-eval harness (EleutherAI, Language Model Evaluation Harness), used as it is: a loaded model in, scores out.

Nothing is downloaded unless asked for: a verification must not depend on what a server says that day. Tasks then need
their data sets in the local cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashnorm.errors import Refusal
from flashnorm.verify.forward import TransformersModel
from flashnorm.verify.subject import Subject, refusing
from flashnorm.verify.tasks import Score, read_scores

INSTALL = "pip install 'flashnorm[eval]'"
_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class Harness:
    """The harness with the names of the tasks to run. `download`: it may fetch data sets that are not there."""

    tasks: tuple[str, ...]
    download: bool
    simple_evaluate: Callable[..., Any]
    wrap: Callable[..., Any]  # HFLM: a Transformers model as the harness asks it

    def scores(self, model: TransformersModel, subject: Subject) -> dict[tuple[str, str], Score]:
        """Run every task on `model`, whose tokenizer is the subject's, one request at a time.

        One at a time, so that both models are asked in the same shapes whatever else is in a batch. Raises `Refusal`
        where there is no tokenizer, `CheckpointError` where the harness cannot run.
        """
        if subject.tokenizer is None:
            raise Refusal(f"{subject.name} has no tokenizer, so it cannot read tasks; leave --tasks out")
        hint = "" if self.download else " (nothing is downloaded; --download lets the harness fetch its data sets)"
        with refusing(f"{', '.join(self.tasks)} cannot be run on {subject.name}{hint}"), _network(self.download):
            wrapped = self.wrap(pretrained=model, tokenizer=subject.tokenizer, batch_size=1)
            found = self.simple_evaluate(model=wrapped, tasks=list(self.tasks), log_samples=False)
            return read_scores(found["results"])


def open_harness(tasks: Sequence[str], download: bool = False) -> Harness:
    """Find the harness and the tasks in it. Raises `Refusal` where it is not installed or does not know a task."""
    with _network(download):
        try:
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            missing = (error.name or "lm_eval").partition(".")[0]
            raise Refusal(f"tasks need the lm-eval harness ({missing} is not installed); run `{INSTALL}`") from error
        manager = TaskManager()
        unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise Refusal(f"lm-eval knows no task {unknown[0]!r}; `lm_eval ls tasks` lists those that it knows")
    return Harness(tuple(tasks), download, simple_evaluate, HFLM)


@contextmanager
def _network(allowed: bool) -> Iterator[None]:
    """Without leave, Hugging Face's libraries stay offline: those that have read their switch, and those to come."""
    if allowed:
        yield
        return
    before = {name: os.environ.get(name) for name in _SWITCHES}
    loaded = [module for module in map(sys.modules.get, ("huggingface_hub.constants", "datasets.config")) if module]
    constants = [(m, name, getattr(m, name)) for m in loaded for name in _SWITCHES if hasattr(m, name)]
    os.environ.update(dict.fromkeys(_SWITCHES, "1"))
    for module, name, _ in constants:
        setattr(module, name, True)
    try:
        yield
    finally:
        for module, name, value in constants:
            setattr(module, name, value)
        for name, setting in before.items():
            if setting is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = setting
