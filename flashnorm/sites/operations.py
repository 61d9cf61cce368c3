"""What each kind of operation does to a gain that multiplies its input.

With a tensor T = g * T0 (g varies along some of T's dimensions), an operation either moves elements (the gain moves
with them), scales or adds (the gain stays), contracts (the gain goes into the weight: `contractions`), or does what no
gain passes through. Everything that has no rule is of the last kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map

from flashnorm.sites.hollow import is_hollow
from flashnorm.sites.shadow import PLAIN, ZERO, Conflict, added, constant_along, impure, tagged
from flashnorm.sites.weights import Located, Read


class Blocked(Exception):
    """No gain passes through this operation. Carries the kind of obstacle and a sentence about it."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


class Context(Protocol):
    """What the rules need to know of the running trace."""

    @property
    def number_read(self) -> bool: ...  # a zero was read off a tensor, so that one among the arguments may be data

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None: ...

    def locate(self, tensor: torch.Tensor) -> Located | None: ...

    def read(self, located: Located, dim: int, codes: torch.Tensor, read: Read) -> bool: ...

    def read_as(self, op: str, bias: torch.Tensor | None, pure: bool) -> Read: ...


@dataclass(frozen=True)
class Call:
    """One executed operation. `result` is what it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    context: Context

    def codes(self, position: int) -> torch.Tensor:
        """The shadow of an argument, all plain when it has none; a Python number is plain data or zero."""
        return self.codes_of(self.args[position])

    def codes_of(self, value: Any) -> torch.Tensor:
        shadow = self.context.shadow(value) if isinstance(value, torch.Tensor) else None
        if shadow is not None:
            return shadow
        if not isinstance(value, torch.Tensor):
            return torch.tensor(ZERO if value == 0 and not self.context.number_read else PLAIN, dtype=torch.int32)
        return torch.zeros((), dtype=torch.int32).expand(value.shape)


@dataclass(frozen=True)
class Executed:
    """An operation that has run. `base`: its name, without the underscore of those that write in place; `tensors`: all
    that are among its arguments."""

    func: Any
    base: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    result: Any

    @property
    def moves_nothing(self) -> bool:
        """The result shares the storage of an input and nothing was written: its shadow is there already."""
        if self.base in ("set", "lift_fresh"):
            return self.base == "set"
        if self.func._schema.is_mutable:
            return False
        out = next(results(self.result), None)
        if out is None:
            return False
        key = out.untyped_storage()._cdata
        return any(t.untyped_storage()._cdata == key for t in self.tensors)

    def call(self, context: Context) -> Call:
        """What a rule is asked."""
        return Call(self.func, self.args, self.kwargs, self.result, context)


Rule = Callable[[Call], Any]  # -> shadow(s) of the result(s): a tensor, a list of tensors, or None for plain data
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


# --- moving elements: run the same operation on the shadow ------------------------------------------------------------


@rule(
    "clone",
    "contiguous",
    "_to_copy",
    "alias",
    "detach",
    "_unsafe_view",
    "_reshape_alias",
    "dropout",
    "view_copy",
)
def same_elements(call: Call) -> Any:
    codes = call.codes(0)
    return codes.reshape(call.result.shape) if isinstance(call.result, torch.Tensor) else codes


# Operations that only pick and place elements -> the arguments that hold data; all others are indices and sizes.
PICKS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("cat", "stack", "index", "index_select", "gather", "take", "masked_select"), (0,)),
    **dict.fromkeys(("repeat", "repeat_interleave", "roll", "flip", "tril", "triu", "unfold", "expand_copy"), (0,)),
    **dict.fromkeys(("reflection_pad1d", "replication_pad1d", "split_with_sizes_copy", "unbind_copy"), (0,)),
    **dict.fromkeys(("slice_scatter", "select_scatter"), (0, 1)),
    **dict.fromkeys(("scatter", "index_copy"), (0, 3)),
    "index_put": (0, 2),
    "where": (1, 2),
}


@rule(*PICKS)
def moved(call: Call) -> Any:
    name = call.func.overloadpacket.__name__.rstrip("_")
    if call.kwargs.get("reduce") is not None:
        raise Blocked("non-linear", f"it is combined with what is there by {call.kwargs['reduce']!r}")
    require_known(arg for position, arg in enumerate(call.args) if position not in PICKS[name])
    if name == "index_put" and (call.args[3] if len(call.args) > 3 else call.kwargs.get("accumulate", False)):
        return _accumulated(call, call.codes(0), call.codes(2))

    def code(leaf: Any) -> Any:
        return call.codes_of(leaf).clone() if isinstance(leaf, torch.Tensor) else int(call.codes_of(leaf))

    args = [tree_map(code, arg) if position in PICKS[name] else arg for position, arg in enumerate(call.args)]
    return call.func(*args, **call.kwargs)


def require_known(indices: Iterable[Any]) -> None:
    """A shadow cannot be moved by a hollow index or mask: PyTorch raises, or returns memory that no one has written."""
    if any(is_hollow(leaf) for leaf in tree_flatten(list(indices))[0]):
        raise Blocked("unknown-places", "it is moved to places that a hollow weight says")


@rule("copy")
def copied(call: Call) -> Any:
    return call.codes(1).expand(call.args[0].shape)


@rule("constant_pad_nd")
def padded(call: Call) -> Any:
    value = call.args[2] if len(call.args) > 2 else 0
    return torch.constant_pad_nd(call.codes(0), call.args[1], int(call.codes_of(value)))


@rule("masked_fill")
def masked(call: Call) -> Any:
    require_known(call.args[1:2])
    return call.codes(0).expand(call.result.shape).masked_fill(call.args[1], int(call.codes(2)))


@rule("fill")
def filled(call: Call) -> Any:
    return call.codes(1).expand(call.args[0].shape)


@rule("zeros", "new_zeros", "zeros_like", "zero")
def zeros(call: Call) -> Any:
    return torch.full(call.result.shape, ZERO, dtype=torch.int32)


# A tensor is zero where the code of the model says so. One that merely holds a zero, such as a scale that training
# starts from zero or a flag computed from the inputs, holds another number in another checkpoint or call.


@rule("lift_fresh")
def literal(call: Call) -> Any:
    """`torch.tensor(0.0)`, and any Python number that is written into a tensor."""
    number = call.result.ndim == 0 and call.result.device.type != "meta"
    return call.codes_of(call.result.item()) if number else call.codes(0)


@rule("scalar_tensor", "full")
def constant_number(call: Call) -> Any:
    value = call.args[-1]  # full(size, value), scalar_tensor(value)
    return call.codes_of(value).expand(call.result.shape)


@rule("_local_scalar_dense")
def read_off(call: Call) -> Any:
    raise Blocked("non-linear", "its values are read as Python numbers")


# --- scaling and adding -----------------------------------------------------------------------------------------------


@rule("mul")
def multiplied(call: Call) -> Any:
    a, b = torch.broadcast_tensors(call.codes(0), call.codes(1))
    if tagged(a) and tagged(b) and ((a > 0) & (b > 0)).any():
        raise Blocked("second-tensor", "it is multiplied by a tensor that carries a gain as well")
    zero = (a == ZERO) | (b == ZERO)
    return torch.where(zero, ZERO, impure(torch.where(a > 0, a, b)))


@rule("div", "true_divide")
def divided(call: Call) -> Any:
    if call.kwargs.get("rounding_mode") is not None:
        raise Blocked("non-linear", "it is divided with rounding")
    numerator, denominator = torch.broadcast_tensors(call.codes(0), call.codes(1))
    if tagged(denominator):
        raise Blocked("non-linear", "it is a divisor")
    return impure(numerator)


@rule("neg", "mul_scalar")
def negated(call: Call) -> Any:
    return impure(call.codes(0))


@rule("add", "sub", "rsub")
def summed(call: Call) -> Any:
    """a + alpha b, a - alpha b, or b - alpha a. What is negated or multiplied keeps its gain, but is another number."""
    a, b = call.codes(0), call.codes(1)
    kind = call.func.overloadpacket.__name__.rstrip("_")
    alpha = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1)
    if kind == "rsub":
        a = impure(a)
    elif kind == "sub" or alpha != 1:
        b = impure(b)
    return _combined(call, a, b)


@rule("lerp")
def interpolated(call: Call) -> Any:
    if tagged(call.codes(2)):
        raise Blocked("non-linear", "it decides how two tensors are mixed")
    return _combined(call, impure(call.codes(0)), impure(call.codes(1))).expand(call.result.shape)


@rule("addcmul")
def multiplied_and_summed(call: Call) -> Any:
    a, b = torch.broadcast_tensors(call.codes(1), call.codes(2))
    if ((a > 0) & (b > 0)).any():
        raise Blocked("second-tensor", "it is multiplied by a tensor that carries a gain as well")
    product = torch.where((a == ZERO) | (b == ZERO), ZERO, impure(torch.where(a > 0, a, b)))
    return _combined(call, call.codes(0), product)


def _combined(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    try:
        return added(a, b)
    except Conflict as conflict:
        raise Blocked("residual-add", str(conflict)) from None


@rule("index_add", "scatter_add")
def accumulated(call: Call) -> Any:
    require_known(call.args[2:3])
    # Impure, for several elements may be added up in one place.
    base, dim, index, source = call.codes(0).clone(), call.args[1], call.args[2], impure(call.codes(3))
    if call.func.overloadpacket.__name__.startswith("scatter_add"):
        taken = source[tuple(slice(0, n) for n in index.shape)]
        result = base.scatter(dim, index, _combined(call, base.gather(dim, index), taken))
        read_back = result.gather(dim, index)
    else:
        taken = source
        result = base.index_copy(dim, index, _combined(call, base.index_select(dim, index), taken))
        read_back = result.index_select(dim, index)
    if not ((read_back | 1) == (taken | 1)).logical_or(taken == ZERO).all():
        raise Blocked("residual-add", "it is added up with tensors that do not carry the same gain")
    return result


def _accumulated(call: Call, base: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    indices, values = call.args[1], impure(values)
    current = torch.ops.aten.index(base, indices)
    result = torch.ops.aten.index_put(base, indices, _combined(call, current, values).expand(current.shape))
    if not ((torch.ops.aten.index(result, indices) | 1) == (values | 1)).logical_or(values == ZERO).all():
        raise Blocked("residual-add", "it is added up with tensors that do not carry the same gain")
    return result


@rule("sum", "mean", "cumsum")
def reduced(call: Call) -> Any:
    codes = call.codes(0)
    dims = call.args[1] if len(call.args) > 1 and call.args[1] is not None else list(range(codes.ndim))
    dims = [dims] if isinstance(dims, int) else list(dims) or list(range(codes.ndim))
    kept = impure(constant(codes, dims))
    return kept.expand(call.result.shape) if kept.ndim == call.result.ndim else kept.reshape(call.result.shape)


def constant(codes: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """`constant_along`, as a rule says it."""
    try:
        return constant_along(codes, dims)
    except Conflict as conflict:
        raise Blocked("mixed-channels", str(conflict)) from None


# Operations that look at a tensor's shape or dtype, not at its values.
VALUE_FREE = {
    "empty_like", "new_empty", "new_ones", "new_full", "ones_like", "full_like", "rand_like", "randn_like",
    "new_empty_strided", "sym_size", "sym_stride", "sym_numel", "is_same_size", "size", "stride",
}  # fmt: skip


def results(value: Any) -> Iterator[torch.Tensor]:
    """The tensors an operation returned."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
