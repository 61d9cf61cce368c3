"""One product for several linears that read the same tensor, over weights that exist once.

The members' parameters stay the objects they were, under their names; only their memory moves, into consecutive rows of
one matrix. So `state_dict`, `save_pretrained` and in-place loading see nothing of it. What gives a parameter other
memory (`to`, loading with `assign`, assignment) tells the group, which gathers the rows anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm.errors import DeviceError, KernelError
from flashnorm.runtime.places import Place, require_intact
from flashnorm.runtime.products import Chosen


class Group:
    """The linears that share a product of one norm's input, and everything that the product needs.

    `norm` has the gain under `gain_name`: gain = offset + weight. `linears`: modules with `weight` (N, K) and `bias`
    (N,) or None, either all with a bias or none.
    """

    def __init__(
        self, norm: nn.Module, gain_name: str, offset: float, eps: float, linears: Sequence[nn.Module]
    ) -> None:
        self.norm, self.gain_name, self.offset, self.eps = norm, gain_name, offset, eps
        self.linears = tuple(linears)
        self.sizes = tuple(len(linear.get_parameter("weight")) for linear in linears)
        self.weight: Tensor | None = None  # all rows; None while the members differ, or after copying
        self.bias: Tensor | None = None
        self.gain: Tensor | None = None
        self.chosen: Chosen = {}
        self.places: tuple[Place, ...] = ()  # of the norm, the linears and what they replace

    def gather(self) -> None:
        """Bring product and parameters in line, after the memory or the values of a parameter have changed."""
        self.weight = self.bias = self.gain = None
        self.chosen = {}
        weights = [linear.get_parameter("weight") for linear in self.linears]
        biases = [linear._parameters["bias"] for linear in self.linears]
        norm, first = self.norm.get_parameter(self.gain_name), weights[0]
        together = all(w.device == first.device for w in (norm, *weights)) and all(
            w.dtype == first.dtype for w in weights
        )
        if first.is_meta or not together:
            return  # in the middle of a conversion, whose last step comes here again, or without memory
        with torch.inference_mode(False), torch.no_grad():
            self.gain = _effective_gain(norm, self.offset)
            self.bias = None if biases[0] is None else joined([b for b in biases if b is not None])
            self.weight = joined(weights)
            if self.weight.is_cuda:
                torch.cuda.synchronize(self.weight.device)  # the kernels are told that the weight is static
        for tensor in (self.weight, self.bias, self.gain):
            if tensor is not None:
                # Otherwise CUDA graphs of compiled models would copy it at every replay: it is no module's parameter.
                torch._dynamo.mark_static_address(tensor)

    def require(self) -> Tensor:
        """The weight of the product, which must still be what the model asks for.

        Raises `KernelError` or `DeviceError` where there is no weight yet, and `Refusal` where modules were replaced or
        hooked that the product stands for.
        """
        if not torch.compiler.is_compiling():
            require_intact(self.places)
        if self.weight is None:
            if torch.compiler.is_compiling():
                raise KernelError("run a copied or converted accelerated model once before it is compiled")
            self.gather()
        if self.weight is None:
            raise DeviceError(
                "linears that share a product have no memory, or were moved or converted apart from each other; do the "
                "same to all of them, or call model.unaccelerate() first"
            )
        return self.weight

    def scatter(self) -> None:
        """Give every parameter memory of its own again."""
        self.weight = self.bias = self.gain = None
        if len(self.linears) > 1:
            for linear in self.linears:
                for parameter in linear.parameters():
                    parameter.data = parameter.data.clone()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the parameters alone; the product is gathered again at their first call."""
        return {**self.__dict__, "weight": None, "bias": None, "gain": None, "chosen": {}}


def _effective_gain(weight: Tensor, offset: float) -> Tensor | None:
    """What multiplies the normed x: None where it is one, the parameter itself where it is the gain, else fp32."""
    if bool((weight + offset == 1).all()):
        return None
    return (
        weight.detach()
        if offset == 0
        else offset + weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    )


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """All rows as one tensor, of which the parameters become parts; they may be so already."""
    first = parameters[0]
    if len(parameters) == 1:
        return first.detach()
    total = sum(map(len, parameters))
    if _consecutive(parameters):
        return first.detach().as_strided((total, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _consecutive(parameters: Sequence[Tensor]) -> bool:
    storage, expected = parameters[0].untyped_storage().data_ptr(), parameters[0].storage_offset()
    for parameter in parameters:
        here = parameter.untyped_storage().data_ptr(), parameter.storage_offset()
        if here != (storage, expected) or not parameter.is_contiguous():
            return False
        expected += parameter.numel()
    return True
