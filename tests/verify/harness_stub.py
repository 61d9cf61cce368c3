"""The public interface of lm-eval 0.4.10 and later, as far as it is used, on a task that this process can score.

`simple_evaluate` takes what the harness's takes, asks the model that it is given, and answers in the harness's form:
names, commas and "N/A" included.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.verify.tiny import tiny_model

KNOWN = ("tiny_next", "tiny_loss")
ITEMS = 64


class LM:
    """`lm_eval.api.model.LM`, which the harness insists on."""


class HFLM(LM):
    """A Transformers model with its tokenizer, made by keywords; a model that is given is run where it is."""

    def __init__(self, pretrained: Any, *, tokenizer: Any = None, batch_size: int = 1) -> None:
        assert not isinstance(pretrained, str)
        assert tokenizer is not None
        self.model, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size


class TaskManager:
    all_tasks = KNOWN

    def match_tasks(self, task_list: list[str]) -> list[str]:
        return [name for name in self.all_tasks if name in task_list]


@torch.inference_mode()
def simple_evaluate(
    model: Any, model_args: Any = None, tasks: list[str] | None = None, *, log_samples: bool = True
) -> dict[str, Any]:
    if not isinstance(model, LM):
        raise TypeError("model must be an LM")
    import huggingface_hub.constants

    simple_evaluate.offline = huggingface_hub.constants.is_offline_mode()
    ids = torch.tensor([model.tokenizer("It was the best of times, it was the worst of times. " * 2)["input_ids"]])
    # What the sound model would say: a task that it can do, as trained models can do theirs.
    answers = tiny_model("llama")(ids).logits[0, :ITEMS].argmax(-1)
    logits = model.model(ids.to(model.model.device)).logits[0, :ITEMS].float().cpu()
    loss = torch.nn.functional.cross_entropy(logits, answers, reduction="none")
    right = (logits.argmax(-1) == answers).double()
    results: dict[str, Any] = {
        "tiny_next": {
            "alias": "tiny_next",
            "acc,none": float(right.mean()),
            "acc_stderr,none": float(right.std() / ITEMS**0.5),
            "loss,strict": float(loss.mean()),
            "loss_stderr,strict": float(loss.std() / ITEMS**0.5),
            "sample_len": ITEMS,
        },
        "tiny_loss": {
            "alias": "tiny_loss",
            "perplexity,none": float(loss.mean().exp()),
            "perplexity_stderr,none": "N/A",
        },
    }
    return {"results": {name: results[name] for name in tasks or []}}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import lm_eval` finds this."""
    contents = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
        "lm_eval.tasks": {"TaskManager": TaskManager},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
