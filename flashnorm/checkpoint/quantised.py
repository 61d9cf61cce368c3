"""Refuse quantised and packed weights: their scales would no longer fit once a gain is multiplied in.

A config can be stripped of its quantisation entry and often is, so the tensors are searched for evidence as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashnorm.checkpoint.header import TensorInfo
from flashnorm.errors import CheckpointError

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
_SIDE_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
    "qmodel.pt": "HQQ",
}
# The last part of a stored name that only one kind of packing gives, and what that kind is called.
_LAST_PARTS = {
    part: scheme
    for scheme, parts in {
        "GPTQ or AWQ": "qweight qzeros g_idx",
        "bitsandbytes": "absmax nested_absmax quant_map nested_quant_map weight_format SCB",
        "compressed-tensors": "weight_packed weight_zero_point weight_g_idx weight_global_scale input_global_scale",
        "scaled integers or fp8": "weight_scale weight_scale_2 weight_scales input_scale activation_scale",
        "HQQ": "W_q",
        "codebooks": "codebooks Qidxs dense_weights",
    }.items()
    for part in parts.split()
}
_ENDS = {"_scale_inv": "scaled fp8", "_qdata": "torchao", "weight._data": "quanto", "weight._scale": "quanto"}
_ALL_ENDS = tuple(_ENDS)
_LOW_PRECISION = ("I8", "U8", "F4", "F6_E2M3", "F6_E3M2")
_INTEGERS = ("I16", "U16", "I32", "U32", "I64", "U64")


def refuse_quantised(
    folder: Path, files: tuple[str, ...], config: dict[str, Any], tensors: dict[str, TensorInfo]
) -> None:
    """Raise `CheckpointError` where the config, a side file or any stored tensor shows that weights are quantised."""
    for evidence in _evidence(files, config, tensors):
        raise CheckpointError(
            f"{folder} holds quantised or packed weights ({evidence}), whose scales folding would break; fold the "
            "unquantised checkpoint and quantise the result"
        )


def _evidence(files: tuple[str, ...], config: dict[str, Any], tensors: dict[str, TensorInfo]) -> Iterator[str]:
    for path, settings in _settings(config, "config.json"):
        yield f"{path} says {settings.get('quant_method') or settings.get('quant_type') or 'so'!r}"
    for name, scheme in _SIDE_FILES.items():
        if name in files:
            yield f"{name}, which {scheme} writes"
    for info in tensors.values():
        kind = _kind(info, tensors)
        if kind:
            yield f"{info.name!r} in {info.shard!r}: {kind}"


def _settings(config: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in config.items():
        if isinstance(value, dict):
            if key in _CONFIG_KEYS and value:
                yield f"{path}: {key}", value
            else:
                yield from _settings(value, f"{path}: {key}")


def _kind(info: TensorInfo, tensors: dict[str, TensorInfo]) -> str | None:
    scheme = _LAST_PARTS.get(info.name.rpartition(".")[2])
    if scheme:
        return scheme
    if info.name.endswith(_ALL_ENDS):
        return next(scheme for end, scheme in _ENDS.items() if info.name.endswith(end))
    if ".quant_state." in info.name:
        return "bitsandbytes"
    if info.name.endswith("_blocks") and f"{info.name.removesuffix('_blocks')}_scales" in tensors:
        return "MXFP4"
    # A first dimension of one is a mask or a table of positions, as old checkpoints store them, not a weight.
    matrix = len(info.shape) >= 2 and info.shape[0] > 1
    if matrix and (info.code in _LOW_PRECISION or info.code.startswith("F8")):
        return f"a matrix of {info.code}"
    if matrix and info.code in _INTEGERS and info.name.endswith("weight"):
        return f"a weight of {info.code}"
    return None
