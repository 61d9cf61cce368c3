"""Compares sites, as they were and as replaced, with norm and linear in float64; the bounds follow from roundings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flashnorm.kernels.bounds import Expected, exceeds, expected_rms_linear, expected_rms_swiglu_linear
from flashnorm.runtime.merging import Group
from flashnorm.runtime.modules import DeferredLinear, GatedMLP
from flashnorm.runtime.observing import Observation
from flashnorm.runtime.planning import Plan, Stock, linear_of

_ROWS = 4
_ELEMENTS = 1 << 22  # of a weight in float64 at a time


@torch.no_grad()
def require_formula(model: nn.Module, plan: Plan, seen: Observation) -> None:
    """Raise `Stock` unless norm and readers compute what the plan says, at inputs of usual size and where eps decides.

    A stock norm may compute in the activation's dtype throughout: its scale then carries up to three roundings, and the
    normed x is rounded twice, once with the gain. Hence twice the bound of one rounding, and 3 u |y|.
    """
    norm = model.get_submodule(plan.norm)
    gain = plan.offset + norm.get_parameter(plan.gain).double()
    x = seen.calls[plan.norm][0].args[0]
    rows = x.reshape(-1, x.shape[-1])[:_ROWS]
    small = rows.double() * (plan.eps / rows.double().square().mean(-1, keepdim=True)).sqrt()
    for given, size in ((rows, "as observed"), (small.to(x.dtype), "as small as epsilon")):
        shaped = given.view(*[1] * (x.dim() - 2), *given.shape)
        with _exact_matmuls():
            outputs = [(name, model.get_submodule(name)(norm(shaped))) for name in _readers(plan)]
        for name, output in outputs:
            linear = linear_of(model, name)
            excess = _worst(given, output, linear.weight, plan.eps, gain, linear.bias, stock=True)
            if not excess <= 1:
                raise Stock(
                    f"with inputs {size}, {name} differs from RMSNorm and linear by {excess:.3g} times what rounding "
                    "explains"
                )


def _readers(plan: Plan) -> list[str]:
    return [name for product in plan.products for name in product.readers]


class Watch:
    """Compares every stand-in in place, while the model runs, on what it reads there.

    Once for each number of rows: that is what decides how a product runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._compared: set[tuple[nn.Module, int]] = set()
        self._hidden = torch.empty(0)  # what the down projection that ran last has read
        self.excess: dict[str, float] = {}  # module -> the largest difference from float64, in units of its bound

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        gated = {linear for mlp in self._names if isinstance(mlp, GatedMLP) for linear in mlp.fused_group.linears}
        for module in self._names:
            if isinstance(module, DeferredLinear) and module not in gated:
                handles.append(module.register_forward_hook(self._linear))
            elif isinstance(module, GatedMLP):
                down = module.get_submodule(module.fused_down)
                handles.append(down.register_forward_pre_hook(self._keep))
                handles.append(module.register_forward_hook(self._gated))
        try:
            with _exact_matmuls():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _linear(self, module: DeferredLinear, args: tuple[Tensor], output: Tensor) -> None:
        group = module.group
        assert group is not None
        if self._is_new(module, args[0]):
            weight, bias = module.get_parameter("weight"), module._parameters["bias"]
            self._note(module, _worst(args[0], output, weight, group.eps, _gain(group), bias, stock=False))

    def _keep(self, down: nn.Module, args: tuple[Tensor]) -> None:
        self._hidden = args[0]

    def _gated(self, module: GatedMLP, args: tuple[Tensor], output: Tensor) -> None:
        """Its last step, the down projection, is the original's own: what goes into it is compared."""
        if self._is_new(module, args[0]):
            self._note(module, _worst_gated(args[0], self._hidden, module))

    def _is_new(self, module: nn.Module, x: Tensor) -> bool:
        case = module, x.numel() // x.shape[-1]
        known = case in self._compared
        self._compared.add(case)
        return not known

    def _note(self, module: nn.Module, excess: float) -> None:
        name = self._names[module]
        self.excess[name] = max(self.excess.get(name, 0.0), excess if excess == excess else float("inf"))


def _gain(group: Group) -> Tensor:
    return group.offset + group.norm.get_parameter(group.gain_name).double()


def _worst(
    x: Tensor, output: Tensor, weight: Tensor, eps: float, gain: Tensor, bias: Tensor | None, *, stock: bool
) -> float:
    """The largest error of the first rows of `output`, in units of the bound; the weight is taken piece by piece."""
    rows, given = _first_rows(x), _first_rows(output)
    step = max(1, _ELEMENTS // weight.shape[1])
    worst = 0.0
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        bias_part = None if bias is None else bias[part]
        expected = expected_rms_linear(rows, weight[part], eps, gain, bias_part, rounds_input=True)
        if stock:
            three = 3 * torch.finfo(x.dtype).eps / 2 * expected.value.abs()
            expected = Expected(expected.value, 2 * expected.bound + three)
        worst = max(worst, exceeds(given[:, part], expected))
    return worst


def _worst_gated(x: Tensor, hidden: Tensor, module: GatedMLP) -> float:
    group = module.fused_group
    weights = [linear.get_parameter("weight") for linear in group.linears]
    gate, up = weights if len(weights) == 2 else weights[0].chunk(2)
    rows, given = _first_rows(x), _first_rows(hidden)
    step = max(1, _ELEMENTS // (2 * gate.shape[1]))
    worst = 0.0
    for start in range(0, len(gate), step):
        part = slice(start, start + step)
        both = torch.cat([gate[part], up[part]])
        expected = expected_rms_swiglu_linear(
            rows, both, group.eps, _gain(group), activation=module.fused_activation, plain_sequence=True
        )
        worst = max(worst, exceeds(given[:, part], expected))
    return worst


def _first_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])[:_ROWS]


@contextmanager
def _exact_matmuls() -> Iterator[None]:
    """Float32 products in float32: TensorFloat-32 rounds their operands, which the bounds do not allow for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
