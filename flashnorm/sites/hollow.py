"""Hollow models: the real structure of a model of any size, without its weights.

Large parameters live on the meta device and hold no memory; small ones (norm gains, biases, convolutions), tables of
places and all activations are real. An operation that mixes both gets its shape from the meta device and its values
from a fixed pool of random numbers. So a 671B-parameter mixture of experts runs a few tokens on a laptop, and its
data-dependent routing takes real decisions, which pure meta tensors could not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from flashnorm.errors import TracingError
from flashnorm.sites.weights import Place, place

# Parameters above this many elements are hollow. Gains and biases of every known model lie far below it.
REAL_LIMIT = 1 << 18

_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.normal}
_POOL_SIZE = 1 << 20
# The dtypes in which weights are numbers; in any other they are codes that some scale gives a meaning.
_FULL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# That of tables of places, such as the experts of each token. Their values decide what is moved where, so that a run
# without them would show nothing; and no weight is stored in integers of eight bytes.
_PLACES = torch.int64


class _LargeOnMeta(TorchFunctionMode):
    """Sends large factory calls to the meta device while a model is being constructed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is _PLACES:
            func = torch.zeros if func is torch.empty else func  # what no one has written is no place
        elif func in _FACTORIES and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list, torch.Size)) else args)
            if all(isinstance(n, int) for n in size) and math.prod(size) > REAL_LIMIT:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def hollow_construction() -> Iterator[None]:
    """Inside, every newly constructed large tensor is hollow."""
    with _LargeOnMeta(), torch.no_grad():
        yield


def hollow_copy(model: nn.Module) -> nn.Module:
    """A structural copy of a live model whose large tensors are hollow; the model itself is not touched.

    Small parameters and buffers keep their values, on the CPU. Full floating-point dtypes become float32; codes
    (integers, float8) stay what they are. Tensors that are one and the same memory are one in the copy as well.
    Raises `TracingError` where parameters overlap in part: a copy would part them.
    """
    _refuse_overlaps(model)
    made: dict[Place, torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:  # parameters first: a buffer may be tied to one
        copied = made.setdefault(place(tensor), _hollow_tensor(tensor.detach()))
        if isinstance(tensor, nn.Parameter):
            copied = copied if isinstance(copied, nn.Parameter) else nn.Parameter(copied, requires_grad=False)
            made[place(tensor)] = copied
        memo[id(tensor)] = copied if isinstance(tensor, nn.Parameter) else copied.detach()
    return copy.deepcopy(model, memo).eval()


def hollow_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a live model takes, as its hollow copy takes them: on the CPU, full dtypes as float32."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to("cpu", torch.float32 if leaf.dtype in _FULL else leaf.dtype)

    moved: dict[str, Any] = tree_map(move, inputs)
    return moved


def _hollow_tensor(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if tensor.dtype in _FULL else tensor.dtype
    if dtype is _PLACES and is_hollow(tensor):
        return torch.zeros(tensor.shape, dtype=dtype)  # a place in any table
    if dtype is not _PLACES and (tensor.numel() > REAL_LIMIT or is_hollow(tensor)):
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _refuse_overlaps(model: nn.Module) -> None:
    """Raise `TracingError` where two parameters share elements without being the same."""
    spans: dict[int, list[tuple[int, int, str, Place]]] = {}
    for name, parameter in model.named_parameters():
        storage, offset, shape, strides = where = place(parameter)
        end = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
        if parameter.numel():
            spans.setdefault(storage, []).append((offset, end, name, where))
    for inside in spans.values():
        inside.sort(key=lambda span: span[:2])
        for (_, end, first, here), (start, _, second, there) in pairwise(inside):
            if start < end and here != there:
                raise TracingError(f"{second} and {first} share memory without being the same; clone one of them")


def settle_values(model: nn.Module) -> None:
    """Give every real parameter finite values: constructors leave some of them uninitialised.

    A single number that is zero at first (a scale that training opens up) becomes another, so that code which skips
    a branch for it does not.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.device.type == "meta" or not parameter.is_floating_point():
            continue
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.1, generator=generator)
        else:
            parameter.data.nan_to_num_(0.0, 0.0, 0.0).clamp_(-100.0, 100.0)
        if parameter.numel() == 1:
            parameter.data.masked_fill_(parameter == 0, 0.5)


class HollowMode(TorchDispatchMode):
    """Runs operations over a mixture of real and hollow tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`; a result that any real activation had a part in is real."""
        tensors = tensors_in(args, kwargs)
        if not any(map(is_hollow, tensors)):
            return func(*map(_off_meta, args), **{name: _off_meta(value) for name, value in kwargs.items()})
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # a value read off a hollow weight: nothing in a model's structure may depend on it
        if all(is_hollow(t) for t in tensors) or _gathers_weight(func, args):
            return func(*_to_meta(args), **_to_meta(kwargs))
        if func.overloadpacket is torch.ops.aten._grouped_mm:
            return self._values(_grouped_product(args[0], args[1]))
        written = _written_arguments(func, args, kwargs)
        result = func(*_to_meta(args), **_to_meta(kwargs))
        for target in written:
            if not is_hollow(target):
                target.copy_(self._values(target))
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        return tree_map(lambda t: self._values(t) if isinstance(t, torch.Tensor) else t, result)

    @cached_property
    def _pool(self) -> torch.Tensor:
        return torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(0))

    def _values(self, like: torch.Tensor) -> torch.Tensor:
        """A real tensor of the shape and dtype of `like`, filled from the pool."""
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype)
        count = like.numel()
        self._next = (self._next + 7919) % (_POOL_SIZE // 2)
        if count <= _POOL_SIZE - self._next:
            values = self._pool[self._next : self._next + count]
        else:
            values = self._pool.repeat(-(-count // _POOL_SIZE))[:count]
        return values.clone().view(like.shape).to(like.dtype)


def _grouped_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The shape and dtype of a grouped product (tokens, k) by (experts, k, n); its meta kernel takes bfloat16 only."""
    return torch.empty(x.shape[0], weights.shape[-1], dtype=x.dtype, device="meta")


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation: such arguments are a tensor or a list of tensors."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def is_hollow(value: Any) -> bool:
    """True for a tensor without memory behind it."""
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _gathers_weight(func: Any, args: tuple[Any, ...]) -> bool:
    """Picking rows of a hollow weight by a real index gives a hollow weight, except for embeddings."""
    return func.overloadpacket in _GATHERS and is_hollow(args[0])


_GATHERS = {torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.gather, torch.ops.aten.select}


def _off_meta(value: Any) -> Any:
    """What a model makes on, or sends to, the device of a weight is an activation: real, though the weight is not."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _to_meta(value: Any) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return tree_map(move, value)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that `func` writes into, by its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(value, torch.Tensor):
            written.append(value)
    return written
