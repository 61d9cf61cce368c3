"""The exact answer: the same stock model with its weights upcast, run in fp64 where memory allows, else in fp32.

Model code casts to float32 by name where it wants more precision (norms, softmax, rotary angles). In an fp64 model
those casts lose precision instead: they alone put a relative error of 4e-7 on SmolLM2's logits, where fp32 as a whole
has 1e-6. So they are sent to fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashnorm.errors import Refusal
from flashnorm.verify.forward import TransformersModel, logits_of
from flashnorm.verify.memory import available_bytes

_HALVES = (torch.float16, torch.bfloat16)


class _Float32MeansFloat64(TorchFunctionMode):
    """Sends every cast to float32 that model code asks for by name to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def _widen(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def exact_logits(model: TransformersModel, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The logits of `ids`, as `logits_of` gives them, with the model upcast in place to `dtype` and computed in it."""
    model.set_experts_implementation("eager")  # the grouped matrix product of the others has no fp64
    model = model.to(dtype)
    with everything_in(dtype):
        return logits_of(model, ids)


@contextmanager
def everything_in(dtype: torch.dtype) -> Iterator[None]:
    """Inside, for float64, model code computes in it wherever it asks for float32, or for no dtype, by name.

    For any other dtype nothing changes. The model and its inputs have to be in `dtype` already.
    """
    if dtype != torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of the tensors that model code makes without naming a dtype
    try:
        with _Float32MeansFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def choose_oracle(model: TransformersModel, own: torch.dtype, logits: int, free: int | None = None) -> torch.dtype:
    """The oracle's dtype: float64 where the loaded `model` fits into memory so, else float32 for one run in 16 bits.

    `own`: the dtype it is run in. `logits`: how many logits are compared; two sets are held at once. `free`: bytes
    (default: what the machine has). An fp32 oracle is 2^13 times finer than fp16 and 2^16 times finer than bf16; for an
    fp32 model it would be the model itself. Raises `Refusal` where no oracle fits.
    """
    free = available_bytes() if free is None else free
    parameters = sum(parameter.numel() for parameter in model.parameters())
    held = sum(parameter.nbytes for parameter in model.parameters())
    choices = (torch.float64, torch.float32) if own in _HALVES else (torch.float64,)
    for dtype in choices:
        needed = dtype.itemsize * (parameters + 2 * logits)
        if needed <= free + held:
            return dtype
    raise Refusal(
        f"the oracle needs {needed / 2**30:.1f} GiB of memory and {(free + held) / 2**30:.1f} GiB are there; use a "
        "larger machine" + ("" if own in _HALVES else ", or pass --dtype bfloat16, whose oracle is half as large")
    )
