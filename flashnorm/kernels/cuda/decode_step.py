"""Run `step.cu`: one decode step of one sequence as one kernel, on Hopper GPUs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashnorm.kernels.cuda import kernel as kernels
from flashnorm.kernels.cuda.driver import Grid, launch
from flashnorm.kernels.cuda.memory import SHARED_MEMORY, Ring, step_bytes
from flashnorm.kernels.decode.reference import ACTIVATIONS
from flashnorm.kernels.decode.shapes import StepShape

_WARP, _EIGHT = 32, 8
_MOST_HEADS = 8  # vectors of eight channels of query heads that a thread can hold
_MOST_VECTORS = 8  # vectors of eight inputs of a linear that a thread can hold
WAITING = ("slot", "words", "warps", "memory", "room", "in all")  # `enum Waiting` of ring.cuh
_NAMES = ("program", "exchange", "ring", "matvec", "attend", "step")


@dataclass(frozen=True)
class NormData:
    """x / sqrt(mean(x²) + eps) · gain; no `eps`, no norm. `gain`: (K,) fp32, or None where it is 1."""

    eps: float | None = None
    gain: Tensor | None = None


@dataclass(frozen=True)
class LayerData:
    """A layer's tensors. Matrices: of the model's dtype, contiguous; vectors: fp32.

    `qkv`: (q, k and v rows, hidden); `up`: (inner, hidden), or (2 · inner, hidden) with the gate first; `keys`,
    `values`: (slots, kv_heads, max_length, head_dim); `angles`: cos and sin, (positions, rotary).
    """

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None)
    norms: tuple[NormData, NormData] = (NormData(), NormData())  # before attention and before the MLP
    post_norms: tuple[NormData, NormData] = (NormData(), NormData())
    multipliers: tuple[float, float] = (1.0, 1.0)
    q_norm: NormData = NormData()
    k_norm: NormData = NormData()
    angles: tuple[Tensor | None, Tensor | None] = (None, None)
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True)
class Ends:
    """`embedding`: (vocabulary, hidden), `head`: (vocabulary, hidden), of the model's dtype; `bias`: fp32."""

    embedding: Tensor
    head: Tensor
    norm: NormData = NormData()
    bias: Tensor | None = None
    multiplier: float = 1.0  # of the embedding
    head_multiplier: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Settings:
    """How the kernel is laid out: consuming warps, the ring, slots that are asked for at once, tokens of the cache that
    are worth a block; and whether it counts what it waits for, which costs a little."""

    warps: int
    ring: Ring
    on_the_way: int = 4
    stretch: int = 60
    timed: bool = False


class DecodeStep:
    """One sequence's step; see `runtime.decode.step.Step`. Steps of one object must not run at the same time."""

    def __init__(self, shape: StepShape, layers: Sequence[LayerData], ends: Ends, settings: Settings | None = None):
        """All tensors are kept and must stay where they are. The shape must be one that `refusal` finds nothing in."""
        device = ends.embedding.device
        self._shape, self._layers, self._ends = shape, tuple(layers), ends
        settings = settings or settings_for(shape)
        self._kernel = _kernel(shape, settings, device)
        blocks = min(self._kernel.multiprocessors, shape.inner // 2)  # each has some of the MLP's inside
        self._grid = Grid(blocks, _WARP * (settings.warps + 1), self._kernel.shared, together=True)
        words = sum(_words(shape, settings.warps, blocks))
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        self._epoch = torch.zeros(2, dtype=torch.int32, device=device)  # and how many blocks have left
        self._waited = torch.zeros((blocks if settings.timed else 0, len(WAITING)), dtype=torch.int64, device=device)
        packed = b"".join(map(packed_layer, self._layers))
        self._table = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)

    def __call__(self, slots: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor:
        """`slots`: (1,), `chosen`, `lengths`: (slots,), int64 on the device. Returns logits (1, vocabulary) fp32."""
        logits = torch.empty((1, self._ends.head.shape[0]), dtype=torch.float32, device=self._ends.head.device)
        tensors = self._table, slots, chosen, lengths, logits, self._layers[0].keys
        argument = packed_step(self._ends, *tensors, self._words, self._epoch, self._waited, len(self._layers))
        launch(self._kernel.function, self._grid, (argument,), torch.cuda.current_stream(logits.device).cuda_stream)
        return logits

    def waited(self) -> dict[str, float]:
        """Of the last step, where it was timed: the part of a block's time that went by waiting, by what for.

        "slot", "words" and "warps" are waits of the first consuming thread, "memory" and "room" (in the ring) of the
        first producing one; means over blocks. What is left of 1 is work.
        """
        cycles = self._waited.double().mean(0)
        return dict(zip(WAITING[:-1], (cycles[:-1] / cycles[-1]).tolist(), strict=True))


def refusal(shape: StepShape, device: torch.device) -> str | None:
    """Why this kernel cannot run a model of this shape on this device; None where it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "the device is no Hopper GPU"
    if shape.dtype not in kernels.HALF:
        return f"its weights are {shape.dtype}"
    if shape.gains and shape.dtype == torch.float16:
        return "gains that are not folded could overflow fp16"
    if any(width % _EIGHT for width in (shape.hidden, shape.inner, shape.head_dim)):
        return "a width is no multiple of 8"
    sharing, vectors = shape.heads // shape.kv_heads, shape.head_dim // _EIGHT
    lanes = min(_WARP, vectors & -vectors)
    if sharing * (vectors // lanes) > _MOST_HEADS or sharing > _MOST_HEADS:
        return f"{sharing} query heads of {shape.head_dim} channels share a key head"
    if _vectors(max(shape.inner, shape.hidden, shape.heads * shape.head_dim), _warps(shape)) > _MOST_VECTORS:
        return f"a linear reads {max(shape.inner, shape.hidden)} inputs"
    return None


def settings_for(shape: StepShape) -> Settings:
    """The layout with the largest slots of those that keep nearly the most bytes in flight."""
    warps = _warps(shape)
    rings = [_ring(shape, warps, columns) for columns in range(256, 2049, 64)]
    held = {ring: _in_flight(shape, ring) for ring in rings}
    enough = [ring for ring in held if held[ring] >= 0.85 * max(held.values())]
    return Settings(warps, max(enough, key=lambda ring: ring.columns))


def source(shape: StepShape, settings: Settings) -> str:
    """The text that is compiled for one model."""
    macros = {
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "ROTARY": shape.rotary,
        "INTERLEAVED": int(shape.interleaved),
        "CAPPED": int(shape.capped),
        "GAINS": int(shape.gains),
        "GATED": int(shape.gated),
        "WARPS": settings.warps,
        "COLUMNS": settings.ring.columns,
        "SLOT": settings.ring.slot,
        "STAGES": settings.ring.stages,
        "ON_THE_WAY": min(settings.on_the_way, settings.ring.stages),
        "STRETCH": settings.stretch,
        "TIMED": int(settings.timed),
    }
    assert shape.activation in ACTIVATIONS
    return kernels.source(_NAMES, macros, shape.dtype, shape.activation)


@cache
def _kernel(shape: StepShape, settings: Settings, device: torch.device) -> kernels.Kernel:
    return kernels.kernel(source(shape, settings), "step", shared_bytes(shape, settings), device)


def shared_bytes(shape: StepShape, settings: Settings) -> int:
    """Bytes of shared memory of one block, as `struct Shared` of step.cu lays them out."""
    longest = max(_whole(width, settings.warps) for width, _ in _linears(shape))
    rest = _whole(shape.hidden, settings.warps) if shape.gains else _EIGHT
    sharing = shape.heads // shape.kv_heads
    return 2 * (longest + rest) + step_bytes(settings.ring, settings.warps, sharing, shape.head_dim)


def _whole(width: int, warps: int) -> int:
    """Elements of all threads' whole eights."""
    return _vectors(width, warps) * _EIGHT * _WARP * warps


def _warps(shape: StepShape) -> int:
    return 8 if _vectors(shape.inner, 8) <= _MOST_VECTORS else 16


def _vectors(width: int, warps: int) -> int:
    return -(-width // (_EIGHT * _WARP * warps))


def _linears(shape: StepShape) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's linears."""
    attended = shape.heads * shape.head_dim
    qkv = attended + 2 * shape.kv_heads * shape.head_dim
    up = shape.inner * (2 if shape.gated else 1)
    return [(shape.hidden, qkv), (attended, shape.hidden), (shape.hidden, up), (shape.inner, shape.hidden)]


def _ring(shape: StepShape, warps: int, columns: int) -> Ring:
    """As many slots as fit."""
    others = shared_bytes(shape, Settings(warps, Ring(columns, 0)))
    return Ring(columns, (SHARED_MEMORY - others) // (Ring(columns, 0).slot + 16))


def _in_flight(shape: StepShape, ring: Ring) -> float:
    """Bytes of weights that the ring holds, on average over a layer's."""
    weights = [(width * rows, width / (-(-width // ring.columns) * ring.columns)) for width, rows in _linears(shape)]
    filled = sum(size * full for size, full in weights) / sum(size for size, _ in weights)
    return 16 * ring.columns * ring.stages * filled


def _words(shape: StepShape, warps: int, blocks: int) -> list[int]:
    """Words of q, k and v, of the parts of attention, of its outputs, of its branch, of the MLP's inside and branch."""
    attended = shape.heads * shape.head_dim
    qkv = attended + 2 * shape.kv_heads * shape.head_dim
    parts = max(1, blocks // shape.kv_heads) * 2 * attended
    of_attended, of_hidden, of_inner = (_whole(width, warps) for width in (attended, shape.hidden, shape.inner))
    return [qkv, parts, of_attended // 2, of_hidden, of_inner // 2, of_hidden]


def packed_layer(layer: LayerData) -> bytes:
    """`struct Layer` of program.cuh."""
    tensors = (
        *(layer.qkv, layer.out, layer.up, layer.down, *layer.biases),
        *(layer.q_norm.gain, layer.k_norm.gain, *layer.angles, layer.keys, layer.values),
    )
    posts = zip(layer.post_norms, layer.multipliers, strict=True)
    return (
        struct.pack("14Q", *map(_pointer, tensors))
        + b"".join(map(_packed_norm, layer.norms))
        + b"".join(struct.pack("Qff", _pointer(norm.gain), _eps(norm), by) for norm, by in posts)
        + struct.pack("4f", _eps(layer.q_norm), _eps(layer.k_norm), layer.scale, layer.softcap or 0.0)
        + struct.pack("i4x", layer.window or 0)
    )


def packed_step(
    ends: Ends,
    table: Tensor,
    slots: Tensor,
    chosen: Tensor,
    lengths: Tensor,
    logits: Tensor,
    keys: Tensor,
    words: Tensor,
    epoch: Tensor,
    waited: Tensor,
    layers: int,
) -> bytes:
    """`struct Step` of program.cuh. `table`: the layers', packed; `keys`: any layer's; `epoch`: and blocks gone."""
    return (
        struct.pack("4Q", *map(_pointer, (table, ends.embedding, ends.head, ends.bias)))
        + _packed_norm(ends.norm)
        + struct.pack("4Q", *map(_pointer, (slots, chosen, lengths, logits)))
        + struct.pack("3Q", _pointer(words), epoch.data_ptr(), epoch.data_ptr() + epoch.itemsize)
        + struct.pack("Q", _pointer(waited))
        + struct.pack("2q", *keys.stride()[:2])
        + struct.pack("3f", ends.multiplier, ends.head_multiplier, ends.softcap or 0.0)
        + struct.pack("3i", layers, ends.head.shape[0], words.numel())
    )


def _packed_norm(norm: NormData) -> bytes:
    return struct.pack("Qf4x", _pointer(norm.gain), _eps(norm))


def _eps(norm: NormData) -> float:
    return -1.0 if norm.eps is None else norm.eps


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
