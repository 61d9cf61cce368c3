"""When an operation may be called as the function that it is, past PyTorch's dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_DEVICES = ("cpu", "cuda")


def plain(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors concerns nothing but the operation itself.

    The way of an operation that Python registered, through the dispatcher and back, takes the host tens of
    microseconds, more than a launch: in eager generation that is what a token waits for. It is needed where somebody
    looks on: a compiler or tracer, a mode, a transform (functorch), autograd, a tensor that is more than a tensor.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd._profiler_enabled():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return not gradient and all(type(tensor) in (Tensor, nn.Parameter) and _is_there(tensor) for tensor in given)


def _is_there(tensor: Tensor) -> bool:
    """On a device with memory; no wrapper of a transform."""
    return tensor.device.type in _DEVICES and not torch._is_functional_tensor(tensor)
