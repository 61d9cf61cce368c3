"""Whether a model counts positions from nought, as callers do, or derives its own from the ids that it is given.

Decoders of the RoBERTa kind look positions up beginning behind the padding id, and count the ids that are not padding.
Counted from nought by a caller, every position is another one. Which kind a model is shows in what it looks up: one
forward pass that is given positions 0, 1, 2, … and one that is given none look up the same rows, or they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashnorm.verify.forward import TransformersModel

_LENGTH = 4


def derives_positions(model: TransformersModel, ask: Callable[..., Tensor]) -> bool:
    """Whether `model` looks up other rows without positions than with those that count from nought.

    `ask(model, ids, **more)`: one forward pass. A model that takes no plain positions, or whose lookups cannot be seen,
    derives nothing that is known here.
    """
    ids = _ordinary(model)
    try:
        with _Lookups() as own:
            ask(model, ids)
        with _Lookups() as given:
            ask(model, ids, position_ids=torch.arange(_LENGTH, device=model.device)[None])
    except Exception:  # third-party code: whatever it says of these positions, the check that needs them will say it
        return False
    return len(own.seen) != len(given.seen) or not all(map(torch.equal, own.seen, given.seen))


def pad_id(model: TransformersModel) -> int | None:
    """The id that the model itself takes for padding, from its config."""
    found = getattr(model.config.get_text_config(), "pad_token_id", None)
    return found if isinstance(found, int) else None


def _ordinary(model: TransformersModel) -> Tensor:
    """(1, _LENGTH) ids of which none is the padding id."""
    pad = pad_id(model)
    return torch.tensor([[i for i in range(_LENGTH + 1) if i != pad][:_LENGTH]], device=model.device)


class _Lookups(TorchFunctionMode):
    """Keeps the rows that embedding tables are asked for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.embedding:
            self.seen.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))
