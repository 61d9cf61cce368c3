"""Run `step.cu`: one decode step of one sequence as one kernel, on Hopper GPUs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from flashnorm.kernels.cuda import kernel as kernels
from flashnorm.kernels.cuda.driver import Grid, current_stream, launch
from flashnorm.kernels.cuda.memory import SHARED_MEMORY, Ring, step_bytes
from flashnorm.kernels.decode.reference import ACTIVATIONS
from flashnorm.kernels.decode.shapes import StepShape

_WARP, _EIGHT = 32, 8
_WARPS, _COLUMNS = 8, 2048
_PIECES = 8  # of rows, in a slot
_BLOCKS = 132  # of an H200
_MOST_SHARING = 8  # query heads of one key head
_MOST_COLUMNS = 4096  # of a piece: a warp keeps its part of them in registers
_MOST_CHANNELS = 2048  # of the query heads of one key head: a lane mixes two of every 64
WAITING = ("slot", "words", "warps", "memory", "room", "in all")  # `enum Waiting` of ring.cuh
_NAMES = ("program", "exchange", "ring", "matvec", "attend", "stretches", "stream", "step")


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
    """How the kernel is laid out: consuming warps, columns of a piece of a row (more only where eight pieces of a row
    have more), the ring, slots that are asked for at once, slots that are asked into the L2 while the ring is full,
    cycles between KiBs that a block asks of memory, and that it asks into the L2, tokens of the cache that are worth a
    block; and whether it counts what it waits for, which costs a little."""

    warps: int
    columns: int
    ring: Ring
    on_the_way: int = 3
    ahead: int = 4
    pace: int = 50
    ahead_pace: int = 88
    stretch: int = 64
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
        words = sum(_words(shape, blocks))
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        self._epoch = torch.zeros(2, dtype=torch.int32, device=device)  # and how many blocks have left
        self._likeliest = torch.zeros(1, dtype=torch.int64, device=device)
        self._waited = torch.zeros((blocks if settings.timed else 0, len(WAITING)), dtype=torch.int64, device=device)
        packed = b"".join(map(packed_layer, self._layers))
        self._table = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)

    def __call__(self, slots: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor:
        """`slots`: (1,), `chosen`, `lengths`: (slots,), int64 on the device. Returns logits (1, vocabulary) fp32."""
        return self._launch(slots, chosen, lengths, None, -1)

    def settled(self, slots: Tensor, chosen: Tensor, lengths: Tensor, following: Tensor, *, spare: int) -> Tensor:
        """The same, and then what `kernels.decode.settle.settle` does. `following`: (1,) int64."""
        return self._launch(slots, chosen, lengths, following, spare)

    def _launch(self, slots: Tensor, chosen: Tensor, lengths: Tensor, following: Tensor | None, spare: int) -> Tensor:
        logits = torch.empty((1, self._ends.head.shape[0]), dtype=torch.float32, device=self._ends.head.device)
        own = self._words, self._epoch, self._likeliest, self._waited
        tensors = self._table, slots, chosen, lengths, logits, following, self._layers[0].keys, *own
        argument = packed_step(self._ends, *tensors, layers=len(self._layers), spare=spare)
        launch(self._kernel.function, self._grid, (argument,), current_stream(logits.device))
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
    sharing = shape.heads // shape.kv_heads
    if sharing > _MOST_SHARING or sharing * shape.head_dim > _MOST_CHANNELS:
        return f"{sharing} query heads of {shape.head_dim} channels share a key head"
    longest = max(_widths(shape), key=lambda width: _columns(width, _COLUMNS))
    if _columns(longest, _COLUMNS) > _MOST_COLUMNS:
        return f"a linear reads {longest} inputs"
    if settings_for(shape).ring.stages < 2:
        return "a linear's inputs leave no room for a ring of its weights"
    return None


def settings_for(shape: StepShape) -> Settings:
    """The layout that was fastest for shapes of 0.1 to 8 billion parameters."""
    found = settings(shape, _WARPS, _COLUMNS)
    if _layer_bytes(shape) > _BLOCKS * found.ring.slot * found.ring.stages:
        return found
    return replace(found, ahead=0, stretch=found.stretch // 2)  # the ring is ahead enough; waits are all there is


def _layer_bytes(shape: StepShape) -> int:
    """Of the weights."""
    attended = shape.heads * shape.head_dim
    kept = 2 * shape.kv_heads * shape.head_dim
    return 2 * shape.hidden * (2 * attended + kept + (3 if shape.gated else 2) * shape.inner)


def settings(shape: StepShape, warps: int, columns: int) -> Settings:
    """With a ring of as many slots as fit."""
    slot = 2 * max(_PIECES * max(_columns(width, columns) for width in _widths(shape)), 2 * _PIECES * shape.head_dim)
    slot = -(-slot // 128) * 128
    others = shared_bytes(shape, Settings(warps, columns, Ring(slot, 0)))
    return Settings(warps, columns, Ring(slot, (SHARED_MEMORY - others) // (slot + 20)))


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
        "COLUMNS": settings.columns,
        "SLOT": settings.ring.slot,
        "STAGES": settings.ring.stages,
        "ON_THE_WAY": min(settings.on_the_way, settings.ring.stages),
        "AHEAD": settings.ahead,
        "STRETCH": settings.stretch,
        "PACE": settings.pace,
        "AHEAD_PACE": settings.ahead_pace,
        "TIMED": int(settings.timed),
    }
    assert shape.activation in ACTIVATIONS
    return kernels.source(_NAMES, macros, shape.dtype, shape.activation)


@cache
def _kernel(shape: StepShape, settings: Settings, device: torch.device) -> kernels.Kernel:
    return kernels.kernel(source(shape, settings), "step", shared_bytes(shape, settings), device)


def shared_bytes(shape: StepShape, settings: Settings) -> int:
    """Bytes of shared memory of one block, as `struct Shared` of step.cu lays them out."""
    inputs = 2 * (max(_widths(shape)) + (shape.hidden if shape.gains else _EIGHT))
    return step_bytes(settings.ring, settings.warps, inputs, shape.heads // shape.kv_heads, shape.head_dim)


def _widths(shape: StepShape) -> tuple[int, int, int]:
    """What the linears read."""
    return shape.hidden, shape.heads * shape.head_dim, shape.inner


def _columns(width: int, most: int) -> int:
    """Of a piece of a row: `pieces_of` in matvec.cuh."""
    pieces = 1
    while pieces < _PIECES and width // pieces > most and width % (2 * pieces * _EIGHT) == 0:
        pieces *= 2
    return width // pieces


def _words(shape: StepShape, blocks: int) -> list[int]:
    """Words of q, k and v, of attention's outputs and branch, of the MLP's inside and branch, of attention's parts."""
    attended = shape.heads * shape.head_dim
    qkv = attended + 2 * shape.kv_heads * shape.head_dim
    parts = max(1, blocks // shape.kv_heads) * (attended + 2 * shape.heads)
    return [qkv, attended // 2, shape.hidden, shape.inner // 2, shape.hidden, parts]


def packed_layer(layer: LayerData) -> bytes:
    """`struct Layer` of program.cuh."""
    tensors = (
        *(layer.qkv, layer.out, layer.up, layer.down, *layer.biases),
        *(layer.keys, layer.values),
    )
    posts = zip(layer.post_norms, layer.multipliers, strict=True)
    return (
        struct.pack("10Q", *map(_pointer, tensors))
        + b"".join(map(_packed_norm, layer.norms))
        + b"".join(struct.pack("Qff", _pointer(norm.gain), _eps(norm), by) for norm, by in posts)
        + packed_rules(layer.q_norm, layer.k_norm, layer.angles, layer.scale, layer.softcap, layer.window)
    )


def packed_rules(
    q_norm: NormData,
    k_norm: NormData,
    angles: tuple[Tensor | None, Tensor | None],
    scale: float,
    softcap: float | None,
    window: int | None,
) -> bytes:
    """`struct Rules` of program.cuh."""
    return (
        struct.pack("4Q", *map(_pointer, (q_norm.gain, k_norm.gain, *angles)))
        + struct.pack("4f", _eps(q_norm), _eps(k_norm), scale, softcap or 0.0)
        + struct.pack("i4x", window or 0)
    )


def packed_step(
    ends: Ends,
    table: Tensor,
    slots: Tensor,
    chosen: Tensor,
    lengths: Tensor,
    logits: Tensor,
    following: Tensor | None,
    keys: Tensor,
    words: Tensor,
    epoch: Tensor,
    likeliest: Tensor,
    waited: Tensor,
    *,
    layers: int,
    spare: int,
) -> bytes:
    """`struct Step` of program.cuh. `table`: the layers', packed; `keys`: any layer's; `epoch`: and blocks gone."""
    return (
        struct.pack("4Q", *map(_pointer, (table, ends.embedding, ends.head, ends.bias)))
        + _packed_norm(ends.norm)
        + struct.pack("5Q", *map(_pointer, (slots, chosen, lengths, logits, following)))
        + struct.pack("3Q", _pointer(words), epoch.data_ptr(), epoch.data_ptr() + epoch.itemsize)
        + struct.pack("2Q", *map(_pointer, (likeliest, waited)))
        + struct.pack("2q", *keys.stride()[:2])
        + struct.pack("3f", ends.multiplier, ends.head_multiplier, ends.softcap or 0.0)
        + struct.pack("4i4x", layers, ends.head.shape[0], words.numel(), spare)
    )


def _packed_norm(norm: NormData) -> bytes:
    return struct.pack("Qf4x", _pointer(norm.gain), _eps(norm))


def _eps(norm: NormData) -> float:
    return -1.0 if norm.eps is None else norm.eps


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
