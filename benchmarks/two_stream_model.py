"""A decoder each of whose norm-and-linear pairs runs through an operation of two streams, eager and captured."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from flashnorm.sites.types import Site
from flashnorm.verify.engines.model import CACHE_NAMES
from flashnorm.verify.races.capture import capture

Operation = Callable[[Tensor, Tensor, float], Tensor]
_WARMUPS = 2


class PairThrough(nn.Module):
    """RMSNorm of gain one, then linear: x (..., K) before the norm to (..., N).

    Each number of rows has an operation of its own, since one keeps buffers of the size that it saw first.
    """

    def __init__(self, weight: nn.Parameter, eps: float, make: Callable[[], Operation]) -> None:
        super().__init__()
        self.weight, self._eps, self._make = weight, eps, make
        self._operations: dict[int, Operation] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) not in self._operations:
            self._operations[len(rows)] = self._make()
        return self._operations[len(rows)](rows, self.weight, self._eps).view(*x.shape[:-1], -1)


def through(folded: nn.Module, sites: Iterable[Site], make: Callable[[], Operation]) -> nn.Module:
    """A copy of a folded model whose norms hand on their input and whose readers of it run through `make()` each.

    `sites`: the model's. Raises `SystemExit` where a norm is read by anything but linears without a bias.
    """
    model = copy.deepcopy(folded)
    for site in sites:
        readers = [model.get_submodule(consumer.weight.removesuffix(".weight")) for consumer in site.consumers]
        plain = all(isinstance(reader, nn.Linear) and reader.bias is None for reader in readers)
        if not site.foldable or site.convention is None or not plain:
            raise SystemExit(f"{site.norm} is not read by plain linears alone; nothing was measured")
        for consumer in site.consumers:
            pair = PairThrough(model.get_parameter(consumer.weight), site.convention.eps, make)
            model.set_submodule(consumer.weight.removesuffix(".weight"), pair)
        model.set_submodule(site.norm, nn.Identity())
    return model


class CapturedDecoding:
    """A `flashnorm.verify.engines.engine.Decoding` of one sequence, whose single tokens replay one captured step.

    Longer pieces, such as the prompt, are read launch by launch. Raises `NotCaptured` where CUDA refuses the capture.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, length: int) -> None:
        """`length`: tokens that the sequence may hold."""
        self._model, self._cache = model, StaticCache(config=model.config, max_cache_len=length)
        self._name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
        self._places = torch.arange(length, device=model.device)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=model.device)
        for _ in range(_WARMUPS):  # streams, buffers and cuBLAS's handles are made before the capture
            self._read(self._token)
        torch.cuda.synchronize()
        clear: Any = torch._C._cuda_clearCublasWorkspaces  # see `flashnorm.kernels.capture.capturing`
        clear()
        self._graph, self._logits = capture(lambda: self._read(self._token))
        clear()
        self._cache.reset()
        self._position.zero_()

    @torch.inference_mode()
    def extend(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > 1:
            return self._read(ids.to(self._token.device))
        self._token.copy_(ids)
        self._graph.replay()
        return self._logits.clone()

    def close(self) -> None:
        """The graph's memory goes with this object."""

    def _read(self, ids: Tensor) -> Tensor:
        """Logits (1, count, vocabulary) of `ids` (1, count). The position is data, or a replay would repeat it."""
        positions = self._position + self._places[: ids.shape[1]]
        seen = (self._places <= positions[:, None])[None, None]
        given = {"attention_mask": seen, "position_ids": positions[None], self._name: self._cache}
        logits: Tensor = self._model(input_ids=ids, **given).logits
        self._position += ids.shape[1]
        return logits
