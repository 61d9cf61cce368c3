"""A model through operations of two streams: what it computes, whether it adds races, how its steps are captured."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.small_decoder import new_decoder
from benchmarks.two_stream_model import CapturedDecoding, PairThrough, through
from flashnorm.passes.fold import fold
from flashnorm.sites.audit import audit
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.lag import check_lag
from flashnorm.verify.races.recorder import find_races
from flashnorm.verify.rounding import measure_rounding
from tests.bench.two_streams_on_host import late, sound
from tests.faults.two_streams import BothJoinedAfterwards, ImplicitJoin, JoinedOutside, TwoStreams
from tests.verify import host_graphs

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(256, (40,), generator=torch.Generator().manual_seed(0))
# Operations that ask the device for a value, which a capture refuses.
ASKING = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


@pytest.fixture(scope="module")
def folded() -> nn.Module:
    """Gains that are not one, so that it matters that they have moved."""
    model = new_decoder(torch.device("cpu"), num_key_value_heads=2, **SIZES).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    assert len(fold(model).folded) == 5
    return model


@pytest.fixture(scope="module")
def sites(folded: nn.Module):
    return audit(folded).sites


def test_every_norm_and_linear_runs_through_an_operation_of_its_own(folded: nn.Module, sites) -> None:
    made: list[TwoStreams] = []

    def make() -> TwoStreams:
        made.append(sound(TwoStreams)())
        return made[-1]

    model = through(folded, sites, make)
    pairs = [module for module in model.modules() if isinstance(module, PairThrough)]
    assert len(pairs) == 2 * 5 + 1
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(model(IDS[None]).logits, folded(IDS[None]).logits, rtol=1e-4, atol=1e-5)
        assert len(made) == len(pairs)
        model(IDS[None, :7])
    assert len(made) == 2 * len(pairs)  # another number of rows needs buffers of another size


def test_what_is_read_by_more_than_linears_is_refused(folded: nn.Module, sites) -> None:
    other = copy.deepcopy(folded)
    other.lm_head = nn.Linear(32, 256)
    with pytest.raises(SystemExit, match=r"model\.norm is not read by plain linears alone"):
        through(other, sites, TwoStreams)


def _on_fake_device(model: nn.Module) -> None:
    """Parameters and buffers without data; called while the recorder plays."""
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("kind", [TwoStreams, JoinedOutside, ImplicitJoin, BothJoinedAfterwards])
def test_a_model_races_where_its_operations_do_and_nowhere_else(kind: type, folded: nn.Module, sites) -> None:
    model, moved = through(folded, sites, kind), []

    def call(ids: Tensor) -> Tensor:
        if not moved:
            _on_fake_device(model)
            moved.append(True)
        position = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cuda")
        return model(input_ids=ids, attention_mask=seen, position_ids=position, use_cache=False).logits

    met = {frozenset((race.first.what, race.second.what)) for race in find_races(call, (IDS[None, :1],), calls=2)}
    early = frozenset(("aten.copy_.default", "aten.mul.Tensor"))  # the result is made of what is still being written
    reused = frozenset(("aten.square.default", "the next allocation in its memory"))  # nobody waits for who reads x
    assert met == {TwoStreams: set(), JoinedOutside: set(), ImplicitJoin: {early, reused}}.get(kind, {early})


@pytest.mark.parametrize("make", [sound(TwoStreams), late(BothJoinedAfterwards)], ids=["sound", "late"])
def test_a_captured_step_decodes_on_and_lags_where_its_operations_do(
    make: type, folded: nn.Module, sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, where a capture is recorded and replayed (`tests.verify.host_graphs`)."""
    host_graphs.install(monkeypatch)
    engine = model_engine(folded, "stock", lambda: copy.deepcopy(folded))
    model = through(folded, sites, make)
    captured: list[CapturedDecoding] = []

    def begin(rows: int) -> CapturedDecoding:
        captured.append(CapturedDecoding(model, len(IDS)))
        return captured[-1]

    outcome = check_lag(replace(engine, begin=begin), IDS, measure_rounding(engine, IDS[None]))
    assert outcome.passed is (make.__mro__[1] is TwoStreams), outcome.meaning
    if not outcome.passed:
        assert "stale_steps" in {figure.name for figure in outcome.failures}
    asked = {func.name().split(".")[0] for func, *_ in captured[0]._graph.calls}
    assert len(asked) > 10
    assert asked & ASKING == set()
