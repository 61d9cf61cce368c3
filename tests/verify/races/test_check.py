"""The check as a whole on the CPU, and its parts that a GPU would run: where delays go, what a graph's edges say."""

from __future__ import annotations

import pytest
import torch

from flashnorm.errors import Refusal
from flashnorm.kernels.two_stream import overlapped_rms_linear
from flashnorm.verify.races.check import _variants, agrees, check_races
from flashnorm.verify.races.delays import Side, delayed, sides_of
from flashnorm.verify.races.graphs import depends_on, read_dot, unjoined
from flashnorm.verify.races.recorder import find_races
from flashnorm.verify.races.sanitizer import sanitizer_findings
from tests.faults.two_streams import FAULTS, JoinedOutside

X = torch.empty(4, 48, dtype=torch.bfloat16)
WEIGHT = torch.empty(32, 48, dtype=torch.bfloat16)


def test_the_shipped_operation_passes_and_every_fault_fails() -> None:
    outcome = check_races(overlapped_rms_linear, (X, WEIGHT, 1e-5))
    assert outcome.passed
    assert "no GPU took part" in outcome.notes[0]
    for make in FAULTS.values():
        outcome = check_races(make(), (X, WEIGHT, 1e-5))
        assert [figure.name for figure in outcome.failures] == ["unordered_pairs"]
        assert "are not ordered" in outcome.meaning


def _entered_itself(x: torch.Tensor) -> torch.Tensor:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with side:
        y = x + 1
    main.wait_stream(side)
    y.record_stream(main)
    return y * 2


def _overlapped(x: torch.Tensor) -> torch.Tensor:
    return overlapped_rms_linear(x, torch.empty(32, 48, device="cuda", dtype=x.dtype), 1e-5)


@pytest.mark.parametrize("side", [Side(0), Side()], ids=str)
@pytest.mark.parametrize("operation", [_overlapped, _entered_itself])
def test_a_delay_goes_into_the_stream_that_is_named(operation, side: Side) -> None:
    """Played by the recorder, whose streams have numbers: 0 is the main one."""
    delays: list[int] = []

    def spin() -> None:
        delays.append(torch.cuda.current_stream().number)

    def run(x: torch.Tensor) -> torch.Tensor:
        before = torch.cuda.stream, torch.cuda.Stream.__enter__, dict(vars(torch.cuda.Stream))
        with delayed(side, spin):
            result = operation(x)
        assert (torch.cuda.stream, torch.cuda.Stream.__enter__, dict(vars(torch.cuda.Stream))) == before
        return result

    assert find_races(run, (X,), calls=2) == []
    assert len(delays) == 2
    assert {number != 0 for number in delays} == {side.entry is not None}


def test_of_two_side_streams_one_at_a_time_is_delayed() -> None:
    """Delayed together, they would meet as they do without a delay: a missing end of either would go unseen."""
    delays: dict[Side, list[int]] = {}
    joined = JoinedOutside()

    def run(x: torch.Tensor) -> torch.Tensor:
        def call() -> torch.Tensor:
            return joined(x, torch.empty(32, 48, device="cuda", dtype=x.dtype), 1e-5)

        for side in sides_of(call):
            spins = delays.setdefault(side, [])
            with delayed(side, lambda spins=spins: spins.append(torch.cuda.current_stream().number)):
                call()
                result = call()
        return result

    assert find_races(run, (X,), calls=1) == []
    assert list(delays) == [Side(0, 2), Side(1, 2), Side()]
    squares, matmul, main = delays.values()
    assert len(squares) == len(matmul) == 2  # once in each of two calls
    assert len({0, *squares, *matmul}) == 3
    assert set(main) == {0}


def test_no_two_calls_have_the_same_scale() -> None:
    x = torch.full((2, 8), 3.0)
    variants = _variants((x, WEIGHT, 1e-5))
    assert [float(first[0, 0]) for first, *_ in variants] == [3.0, 6.0, 12.0]
    assert all(rest[0] is WEIGHT for _, *rest in variants)


JOINED = """digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[style="bold" shape="octagon" label="0
square_kernel\\<\\<\\<1,32\\>\\>\\>"];
"graph_1_node_1"[style="bold" shape="octagon" label="1
gemm_kernel"];
"graph_1_node_2"[style="bold" shape="octagon" label="2
mul_kernel"];
"graph_1_node_0" -> "graph_1_node_2";
"graph_1_node_1" -> "graph_1_node_2";
}
}
"""


def test_a_joined_graph_has_one_end_and_both_dependencies() -> None:
    graph = read_dot(JOINED)
    assert len(graph.nodes) == 3
    assert unjoined(graph) == []
    assert depends_on(graph, "mul_kernel", ["gemm_kernel", "square_kernel"]) == []


def test_a_missing_edge_is_found() -> None:
    graph = read_dot(JOINED.replace('"graph_1_node_0" -> "graph_1_node_2";\n', ""))
    assert unjoined(graph) == ["square_kernel"]
    assert depends_on(graph, "mul_kernel", ["gemm_kernel", "square_kernel"]) == ["square_kernel"]


# As CUDA 12 and later write it with every parameter.
VERBOSE = r"""digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[style="solid" style="solid" shape="record" label="{MEMSET
| {{ID | node handle | dptr | pitch | value | elementSize | width | height} | {0 (topoId: 2) | 0x0A | 0x7F | 0 | 0 | 1 | 640 | 1}}}"];

"graph_1_node_1"[style="bold" shape="record" label="{KERNEL
| {ID | 1 (topoId: 1) | _ZN2at6native13reduce_kernelILi512ELi1EEEvT1_\<\<\<\{16,10,2\},128,0\>\>\>}
| {{node handle | func handle} | {0x000000000A00BB80 | 0x000000000D56CF70}}
| {accessPolicyWindow | {base_ptr | num_bytes | hitRatio | hitProp | missProp} | {0x00 | 0 | 0.000000 | N | N}}
| {cooperative | 0}
| {priority | 0}
}"];

"graph_1_node_2"[style="bold" shape="record" label="{KERNEL
| {ID | 2 (topoId: 0) | fill\<\<\<1,128,0\>\>\>}
}"];
"graph_1_node_0" -> "graph_1_node_2" [headlabel=0];
"graph_1_node_1" -> "graph_1_node_2";
}
}
"""  # noqa: E501


def test_the_verbose_form_is_read_and_its_nodes_are_called_by_name() -> None:
    graph = read_dot(VERBOSE)
    assert len(graph.nodes) == 3
    assert unjoined(graph) == []
    assert depends_on(graph, "fill", ["reduce_kernel", "MEMSET"]) == []
    first, second = (line for line in VERBOSE.splitlines() if "->" in line)
    assert unjoined(read_dot(VERBOSE.replace(first, ""))) == ["MEMSET"]
    assert unjoined(read_dot(VERBOSE.replace(second, ""))) == ["_ZN2at6native13reduce_kernelILi512ELi1EEEvT1_"]


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(Refusal, match="no nodes were found"):
        read_dot("digraph dot {}")
    with pytest.raises(Refusal, match="no node of the graph is called 'add'"):
        depends_on(read_dot(JOINED), "add", [])


def test_half_of_the_digits_must_agree_and_nan_never_does() -> None:
    exact = torch.ones(8)
    assert agrees(exact * (1 + 2**-13), exact)
    assert not agrees(exact * (1 + 2**-11), exact)
    assert not agrees(torch.full((8,), float("nan")), exact)


def test_a_run_that_fails_by_itself_is_refused_with_its_last_line() -> None:
    with pytest.raises(Refusal, match=r"could not be run under the sanitizer: .*has no attribute 'absent'"):
        sanitizer_findings("tests.faults.two_streams:absent")
