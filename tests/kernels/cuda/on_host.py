"""A kernel's source as a library for the CPU: `host/device.h` stands in for what is written in PTX.

Threads take turns, so that a run is the same each time, and ends where nobody can go on. Not seen: speed, what one
launch does to the next, and the order in which a GPU's blocks see plain loads and stores of each other.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from torch import Tensor

HOST = Path(__file__).parent / "host"
_FUNCTION = re.compile(r"^(?:template <[^\n]*>\n)?__device__ (?:[^\n]*\}\n|.*?^\}\n)", re.MULTILINE | re.DOTALL)
_FIRST = "// What the kernels share"  # of the files, behind the macros
_SHARED = "extern __shared__ char memory[];"
_OPTIONS = ("-std=c++17", "-Og", "-w", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", f"-I{HOST}")


class Fault(Exception):
    """What a GPU would not have forgiven."""


def tensor_map(matrix: Tensor, rows: int, columns: int) -> bytes:
    """What `device.h` takes for the copy engine's description of boxes of (`rows`, `columns`) in a matrix."""
    stride = matrix.stride(0) * matrix.itemsize
    return struct.pack("QQQQII", matrix.data_ptr(), *matrix.shape, stride, rows, columns).ljust(128, b"\0")


class Library:
    """A compiled kernel. One run at a time."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.play.restype = ctypes.c_char_p
        self._library.bytes_read.restype = ctypes.c_uint64

    def allow(self, tensors: Iterable[Tensor], written: Iterable[Tensor] = ()) -> None:
        """Bulk copies may read these, and nothing else; what the kernel in front has `written`, after the wait."""
        self._library.allow_nothing()
        for complete, some in ((True, tensors), (False, written)):
            for tensor in some:
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                size = ctypes.c_uint64((last + 1) * tensor.itemsize)
                self._library.allow(ctypes.c_void_p(tensor.data_ptr()), size, ctypes.c_bool(complete))

    def play(self, argument: bytes, blocks: int, shared: int, seed: int) -> int:
        """Run so many blocks, all at once, in an order that follows from `seed`.

        `argument`: the kernel's struct; `shared`: bytes of shared memory of a block. Returns the bytes that bulk copies
        have read. Raises `Fault`.
        """
        fault = self._library.play(ctypes.create_string_buffer(argument), blocks, shared, ctypes.c_uint64(seed))
        read = int(self._library.bytes_read())
        if fault:
            raise Fault(fault.decode())
        return read


@cache
def library(text: str, entry: str, planted: tuple[tuple[str, str], ...] = (), *, checked: bool = True) -> Library:
    """The kernel of this text, with `entry`, a file of `host`, behind it.

    `planted`: what is in the text, and what is put in its place. `checked`: an index outside of its array is a fault.
    """
    for old, new in planted:
        assert old in text
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        source, built, path = (Path(folder, f"kernel.{ending}") for ending in ("cpp", "o", "so"))
        source.write_text(_for_host(text) + f'#include "grid.inc"\n#include "{entry}"\n')
        options = [*_OPTIONS, "-fsanitize=bounds"] if checked else _OPTIONS
        subprocess.run(["g++", *options, "-c", "-o", built, source], check=True)
        # Apart, since the compiler would add the sanitizer's library, which device.h does without.
        subprocess.run(["g++", "-shared", "-o", path, built], check=True)
        return Library(path)


def _for_host(text: str) -> str:
    """Without the functions that are written in PTX, and with device.h, which has them."""
    for found in set(_FUNCTION.findall(text)):
        if "asm" in found:
            text = text.replace(found, "")
    assert text.count(_FIRST) == text.count(_SHARED) == 1
    text = text.replace(_SHARED, "char* const memory = device::shared_memory();")
    return text.replace(_FIRST, '#include "device.h"\n' + _FIRST)
