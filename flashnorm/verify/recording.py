"""What every module of a model gives, in the order in which they finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from flashnorm.runtime.modules import unlike_stock

Seen = Callable[[str, Tensor], None]


@contextmanager
def watched(model: nn.Module, seen: Seen) -> Iterator[None]:
    """While the block runs, `seen(name, output)` for each call of each named module but the model itself.

    Of several outputs the first tensor counts. A module that is called several times is seen each time. What stands in
    for a module of an accelerated model and returns something else is left out.
    """
    left_out = unlike_stock(model)
    handles = [
        module.register_forward_hook(lambda _m, _a, output, name=name: _tell(seen, name, output))
        for name, module in model.named_modules()
        if name and module not in left_out
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tell(seen: Seen, name: str, output: Any) -> None:
    tensor = first_tensor(output)
    if tensor is not None and tensor.is_floating_point():
        seen(name, tensor.detach())


def first_tensor(output: Any) -> Tensor | None:
    """The tensor itself, the first of a tuple, or the first field of a model output; None where there is none."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else ()
    return next((part for part in parts if isinstance(part, Tensor)), None)
