"""Every planted fault by name, with the check that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.engines.slots import slots_engine
from tests.faults.attention import bidirectional, mask_off_by_one
from tests.faults.batches import UnclearedSlots, neighbour_read, shifted_after_padding
from tests.faults.decoding import late_once, writes_one_place_early
from tests.faults.norms import epsilon_dropped, epsilon_scaled, scale_twice, small_embedding
from tests.faults.numbers import large_stream, product_in_half, untranslated_adapter, with_adapter
from tests.faults.streams import stale_products
from tests.verify import faults as folds

Change = Callable[[nn.Module], nn.Module]
LATE = 60  # the position whose logits are late; tests with 500 tokens choose another


@dataclass(frozen=True)
class Fault:
    """`plant` makes the faulty model of a sound one (a copy), `wrap` changes how a model is asked.

    `source` prepares the sound model, in place or as a copy. `check`: the name of the check that must catch it.
    """

    name: str
    check: str
    plant: Change = lambda model: model
    wrap: Callable[[Engine, nn.Module], Engine] = lambda engine, model: engine
    source: Change = lambda model: model
    family: str = "llama"


def _joined_implicitly(model: nn.Module) -> nn.Module:
    readers = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return stale_products(model, readers, tuple(range(len(model.model.layers))))


def _uncleared(engine: Engine, model: nn.Module) -> Engine:
    return slots_engine(UnclearedSlots(model, slots=4, max_length=512), engine)


FAULTS = (
    Fault("implicit join of two streams: the matmul's buffer is stale", "lag", _joined_implicitly),
    Fault("one token's logits one step late at one position", "lag", wrap=lambda e, m: late_once(e, LATE)),
    Fault("key and value written at the wrong position", "lag", wrap=writes_one_place_early),
    Fault("bidirectional attention from layer 1 on", "causality", bidirectional),
    Fault("causal mask off by one", "causality", mask_off_by_one),
    Fault("position ids off by one after padding", "batching", wrap=shifted_after_padding),
    Fault("a neighbour's row read at the end of a row", "batching", neighbour_read),
    Fault("sequence slot not cleared", "slots", wrap=_uncleared),
    Fault("gain read in the other convention, 1 + w for w", "parity", folds.other_convention),
    Fault("gain folded twice", "parity", folds.folded_twice),
    Fault("gain folded into q and k only", "parity", folds.value_projection_missed),
    Fault("final norm folded into a tied head", "parity", folds.tied_head_folded),
    Fault("one expert not folded", "parity", folds.expert_missed, family="mixtral"),
    Fault("adapter left untranslated", "parity", untranslated_adapter, source=with_adapter),
    Fault("epsilon dropped", "parity", epsilon_dropped, source=small_embedding),
    Fault("epsilon scaled by the fold", "parity", epsilon_scaled, source=small_embedding),
    Fault("scale applied twice", "parity", scale_twice),
    Fault("fp16 product overflows before the scale", "parity", product_in_half, source=large_stream),
)
