"""Run `attention.cu`: attention of one new token per row against the cache, on Hopper GPUs."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashnorm.kernels.cuda import kernel as kernels
from flashnorm.kernels.cuda.decode_step import NormData, packed_rules
from flashnorm.kernels.cuda.driver import Grid, current_stream, launch
from flashnorm.kernels.cuda.memory import TWO_BLOCKS, Ring, attention_bytes
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from flashnorm.kernels.dispatch import cuda_runs

_WARP, _WARPS, _EIGHT = 32, 8, 8
_SLOT = 32 << 10  # bytes of keys and values
_MOST_SHARING = 8  # query heads of one key head
_MOST_CHANNELS = 1024  # of the query heads of one key head
_BLOCKS = 132  # one for each multiprocessor of an H200: the next kernel begins beside them
_MOST_SPLITS = 8  # blocks of a cluster


@dataclass(frozen=True)
class Form:
    """What the kernel is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    interleaved: bool
    capped: bool
    splits: int
    stages: int
    dtype: torch.dtype


def takes(qkv: Tensor, keys: Tensor, shape: AttentionShape) -> bool:
    """Whether the kernel runs on the device of these tensors, for their dtype and shape."""
    sharing = shape.heads // shape.kv_heads
    fits = (
        shape.heads % shape.kv_heads == 0
        and sharing <= _MOST_SHARING
        and sharing * shape.head_dim <= _MOST_CHANNELS
        and shape.head_dim % _EIGHT == 0
    )
    return fits and qkv.dtype == keys.dtype and qkv.dtype in kernels.HALF and cuda_runs(qkv.device)


def splits_for(rows: int, kv_heads: int) -> int:
    """Blocks that share the tokens of a key head: a power of two, so many that they occupy a large GPU."""
    return 1 << (max(1, min(_MOST_SPLITS, _BLOCKS // (rows * kv_heads))).bit_length() - 1)


def attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    out: Tensor,
    shape: AttentionShape,
    norms: QkNorm,
    *,
    early: bool = False,
) -> None:
    """The same as `decode.attention.decode_attention`, for what it `takes`. Gains and tables: fp32, contiguous.

    `qkv`, `out`: rows of 16-bit floats, each contiguous; `keys`, `values`: a key head's tokens follow each other, and
    each head begins at a multiple of 16 bytes. `early`: all but `qkv` was complete when the kernel in front began.
    """
    assert all(table.is_contiguous() for table in tables or ())
    assert all(tensor.stride(-1) == 1 for tensor in (qkv, keys, values, out))
    assert keys.stride() == values.stride()
    assert keys.stride(2) == shape.head_dim
    form = form_of(qkv, shape, splits_for(len(qkv), shape.kv_heads))
    kernel = _kernel(form, qkv.device)
    launch(
        kernel.function,
        Grid(len(qkv) * form.kv_heads * form.splits, _WARP * (_WARPS + 1), kernel.shared, cluster=form.splits),
        (packed_problem(qkv, keys, values, slots, positions, tables, out, shape, norms, early=early),),
        current_stream(qkv.device),
    )


def form_of(qkv: Tensor, shape: AttentionShape, splits: int) -> Form:
    sharing = shape.heads // shape.kv_heads
    others = attention_bytes(Ring(_SLOT, 0), _WARPS, sharing, shape.head_dim)
    return Form(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.rotary,
        shape.interleaved,
        shape.softcap is not None,
        splits,
        max(2, (TWO_BLOCKS - others) // (_SLOT + 20)),
        qkv.dtype,
    )


def packed_problem(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    out: Tensor,
    shape: AttentionShape,
    norms: QkNorm,
    *,
    early: bool,
) -> bytes:
    """`struct Problem` of the source."""
    q_norm, k_norm = NormData(norms.q_eps, norms.q_gain), NormData(norms.k_eps, norms.k_gain)
    rules = packed_rules(q_norm, k_norm, tables or (None, None), shape.scale, shape.softcap, shape.window)
    tensors = qkv, keys, values, out, slots, positions
    strides = qkv.stride(0), out.stride(0), *keys.stride()[:2]
    return rules + struct.pack("6Q4qi4x", *(tensor.data_ptr() for tensor in tensors), *strides, early)


def shared_bytes(form: Form) -> int:
    return attention_bytes(Ring(_SLOT, form.stages), _WARPS, form.heads // form.kv_heads, form.head_dim)


@cache
def _kernel(form: Form, device: torch.device) -> kernels.Kernel:
    return kernels.kernel(source(form), "attention", shared_bytes(form), device)


def source(form: Form) -> str:
    """The text that is compiled for one form."""
    macros = {
        "HEADS": form.heads,
        "KV_HEADS": form.kv_heads,
        "HEAD_DIM": form.head_dim,
        "ROTARY": form.rotary,
        "INTERLEAVED": int(form.interleaved),
        "CAPPED": int(form.capped),
        "SPLITS": form.splits,
        "STAGES": form.stages,
        "SLOT": _SLOT,
        "WARPS": _WARPS,
        "ON_THE_WAY": form.stages,
        "TIMED": 0,
    }
    return kernels.source(("program", "ring", "attend", "attention"), macros, form.dtype, None)
