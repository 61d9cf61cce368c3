"""Load machine code, describe matrices to the copy engine, and launch: the few calls of the CUDA driver used here."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from flashnorm.errors import KernelError

_ELEMENTS = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}
# Bytes of a box's row to the swizzle that spreads a column over all banks.
_SWIZZLES = {
    16: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}
_MAP_BYTES = 128


@dataclass(frozen=True)
class Grid:
    """Blocks, threads of a block, bytes of shared memory of a block, whether all blocks must run at the same time, and
    how many neighbours share their memory.

    Where they need not, the kernel may start before the kernel before it ends (see `kernels/launch.py`).
    """

    blocks: int
    threads: int
    shared: int
    together: bool = False
    cluster: int = 1


def load(code: bytes, name: str, shared: int, device: torch.device) -> Any:
    """The function `name` of a piece of machine code, on `device`, allowed `shared` bytes of shared memory.

    Multiprocessors give it all the shared memory they have, so that blocks of two launches find room beside each other.
    """
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    share = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT  # in percent
    with torch.cuda.device(device):
        module = _checked(driver.cuModuleLoadData(code))
        function = _checked(driver.cuModuleGetFunction(module, name.encode()))
        _checked(driver.cuFuncSetAttribute(function, limit, shared))
        _checked(driver.cuFuncSetAttribute(function, share, 100))
    return function


def tensor_map(matrix: Tensor, rows: int, columns: int) -> bytes:
    """How the copy engine finds boxes of (`rows`, `columns`) in an addressable matrix of 16-bit floats."""
    return _tensor_map(matrix.data_ptr(), matrix.shape, matrix.stride(0), matrix.dtype, rows, columns)


@lru_cache(maxsize=4096)  # a pure function of its arguments; encoding takes longer than the rest of a launch
def _tensor_map(
    pointer: int, shape: tuple[int, int], stride: int, dtype: torch.dtype, rows: int, columns: int
) -> bytes:
    height, width = shape
    encoded = _checked(
        driver.cuTensorMapEncodeTiled(
            _ELEMENTS[dtype],
            2,
            pointer,
            [driver.cuuint64_t(width), driver.cuuint64_t(height)],
            [driver.cuuint64_t(stride * dtype.itemsize)],
            [driver.cuuint32_t(columns), driver.cuuint32_t(rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            _SWIZZLES[columns * dtype.itemsize],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
        )
    )
    return ctypes.string_at(encoded.getPtr(), _MAP_BYTES)


def current_stream(device: torch.device) -> int:
    """The handle of the stream on which PyTorch queues work on `device`, without the object that stands for it."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def launch(function: Any, grid: Grid, arguments: tuple[bytes | ctypes._SimpleCData[Any], ...], stream: int) -> None:
    """Launch. Bytes are passed by value."""
    holders = [ctypes.create_string_buffer(a, len(a)) if isinstance(a, bytes) else a for a in arguments]
    pointers = (ctypes.c_void_p * len(holders))(*map(ctypes.addressof, holders))
    _checked(driver.cuLaunchKernelEx(_config(grid, stream), function, ctypes.addressof(pointers), 0))


@lru_cache(maxsize=1024)  # it takes longer to describe than the launch itself
def _config(grid: Grid, stream: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = grid.threads, 1, 1
    config.sharedMemBytes = grid.shared
    config.hStream = stream
    config.attrs = [_attribute(grid), *([_clustered(grid.cluster)] if grid.cluster > 1 else [])]
    config.numAttrs = len(config.attrs)
    return config


def _attribute(grid: Grid) -> Any:
    attribute = driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    if grid.together:
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
    else:
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _clustered(blocks: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    return attribute


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"the CUDA driver refused: {status.name}")
    return values[0] if values else None
