"""The API of the installed torch against what is used of it and what stands in for it, without a device."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import flashnorm
import flashnorm.verify.races
from flashnorm.errors import Refusal
from flashnorm.verify.races.clocks import HOST, Clocks
from flashnorm.verify.races.graphs import Graph
from flashnorm.verify.races.recorder import _Recorder
from flashnorm.verify.races.stand_ins import Event, Player, Stream
from tests.verify.races.real import real

SOURCES = sorted(Path(flashnorm.verify.races.__file__).parent.glob("*.py"))
STUB = Path(torch.__file__).parent / "_C" / "__init__.pyi"
PAIRS = [(Stream, torch.cuda.Stream, "_CudaStreamBase"), (Event, torch.cuda.Event, "_CudaEventBase")]

ONLY_WITH_CUDA = {  # names that builds without CUDA lack, and where in PyTorch's compiler they are used
    "torch._C._cuda_clearCublasWorkspaces": "cudagraph_trees.py",
    "torch._C._cuda_getCurrentRawStream": "codegen/wrapper.py",
}


def _declared() -> dict[str, set[str]]:
    """What torch declares of its compiled classes, which a build without CUDA lacks."""
    tree = ast.parse(STUB.read_text())
    return {
        node.name: {
            child.name if isinstance(child, ast.FunctionDef) else child.target.id
            for child in node.body
            if isinstance(child, (ast.FunctionDef, ast.AnnAssign))
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _is_of_a_class(name: str) -> bool:
    return not name.startswith("_") or name in ("__enter__", "__exit__", "__cuda_stream__", "_as_parameter_")


@pytest.mark.parametrize(("ours", "theirs", "base"), PAIRS, ids=["stream", "event"])
def test_a_stand_in_has_every_attribute_of_the_real_class(ours: type, theirs: type, base: str) -> None:
    declared, generic = _declared(), getattr(torch, theirs.__name__)
    names = set(dir(theirs)) | set(dir(generic)) | declared[base] | declared[theirs.__name__]
    player = Player(Clocks())
    instance = player.stream_class() if ours is Stream else player.event_class()
    wanted = {name for name in names if _is_of_a_class(name)}
    assert {"device", "synchronize", "query"} <= wanted  # the real names were found
    assert {name for name in wanted if not hasattr(instance, name)} == set()


@pytest.mark.parametrize(("ours", "theirs", "base"), PAIRS, ids=["stream", "event"])
def test_its_methods_take_what_the_real_ones_take(ours: type, theirs: type, base: str) -> None:
    methods = [name for name, value in vars(theirs).items() if inspect.isfunction(value) and not name.startswith("__")]
    assert len(methods) > 4
    for name in methods:
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(getattr(theirs, name)).parameters
        ), name
    player = Player(Clocks())
    made = player.stream_class if ours is Stream else player.event_class
    assert list(inspect.signature(made).parameters) == list(inspect.signature(theirs.__new__).parameters)[1:]


def test_what_replaces_a_function_takes_what_it_takes() -> None:
    for name, replacement in _Recorder(torch._subclasses.FakeTensorMode())._replacements().items():
        original = getattr(torch.cuda, name)
        assert list(inspect.signature(replacement).parameters) == list(inspect.signature(original).parameters), name


def _chains(path: Path) -> set[tuple[str, ...]]:
    """Every dotted name that a source reads, as its parts."""
    chains = set()
    for node in ast.walk(ast.parse(path.read_text())):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name):
            chains.add((node.id, *parts))
    return chains


def _missing(chains: set[tuple[str, ...]]) -> set[str]:
    missing = set()
    for chain in chains:
        value = torch
        for name in chain[1:]:
            if not hasattr(value, name):
                missing.add(".".join(chain))
                break
            value = getattr(value, name)
    return missing


@pytest.mark.parametrize(("name", "path"), ONLY_WITH_CUDA.items())
def test_names_that_builds_without_cuda_lack_are_used_by_torch_itself(name: str, path: str) -> None:
    used = Path(torch.__file__).parent.joinpath("_inductor", path).read_text(encoding="utf-8")
    assert name in used


def test_every_name_of_torch_that_is_used_exists() -> None:
    """In the whole package, since most of what runs on a device alone is elsewhere; not of our own operations."""
    paths = Path(flashnorm.__file__).parent.rglob("*.py")
    chains = {chain for path in paths for chain in _chains(path) if chain[0] == "torch"}
    chains = {chain for chain in chains if chain[:3] != ("torch", "ops", "flashnorm")}
    assert {("torch", "cuda", "graph_pool_handle"), ("torch", "_C", "_cuda_endAllocateToPool")} <= chains
    assert _missing(chains) <= ONLY_WITH_CUDA.keys()
    assert _missing({("torch", "cuda", "Stream", "number")}) == {"torch.cuda.Stream.number"}


def test_every_attribute_of_a_graph_that_is_used_exists() -> None:
    """Of variables that are called `graph`: the captured one's, or the one's that was read from it."""
    used = {chain[1] for path in SOURCES for chain in _chains(path) if chain[0] == "graph"}
    assert {"replay", "instantiate", "debug_dump"} <= used
    read = set(dir(Graph)) | set(Graph.__dataclass_fields__)
    assert {name for name in used if not hasattr(torch.cuda.CUDAGraph, name) and name not in read} == set()
    assert "keep_graph" in inspect.signature(torch.cuda.CUDAGraph.__new__).parameters
    assert {"cuda_graph", "pool"} <= set(inspect.signature(torch.cuda.graph.__init__).parameters)


def test_asking_orders_as_waiting_does() -> None:
    for ask in (Event.query, Event.synchronize, lambda event: event.elapsed_time(event)):
        clocks = Clocks()
        player = Player(clocks)
        clocks.allocate(0, 0, "buffer")
        clocks.access(0, 0, write=True, what="write")
        event = player.event_class(enable_timing=True)
        event.record()
        ask(event)
        clocks.access(0, player.stream_class().number, write=False, what="read")
        assert clocks.races == []
        assert clocks.record(HOST)


def test_a_stream_is_current_within_its_own_context_and_equal_by_number() -> None:
    player = Player(Clocks())
    side = player.stream_class(priority=-1)
    with side as entered, side:
        assert player.current[-1] is side is entered
    assert player.current == [player.streams[0]]
    with player.on(None):
        assert player.current[-1] == player.streams[0]
    assert player.stream_class(stream_id=side.stream_id, device_index=0, device_type=1) == side != player.streams[0]
    assert Player(Clocks()).streams[0] != player.streams[0]


def test_what_is_of_another_play_or_of_none_is_refused() -> None:
    player, other = Player(Clocks()), Player(Clocks())
    for stream in (other.stream_class(), real(torch.cuda.Stream)):
        with pytest.raises(Refusal, match="a CUDA stream that was made outside of the call"):
            player.event_class().record(stream)
        with pytest.raises(Refusal, match=r"torch\.cuda\.Stream in the call"):
            player.stream_class().wait_stream(stream)
    with pytest.raises(Refusal, match="a CUDA event that was made outside of the call"):
        player.stream_class().wait_event(real(torch.cuda.Event))
    with pytest.raises(Refusal, match="of another process"):
        player.event_class.from_ipc_handle(None, b"")
    player.over = True
    with pytest.raises(Refusal):
        player.streams[0].synchronize()
