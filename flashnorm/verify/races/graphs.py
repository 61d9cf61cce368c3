"""A captured graph's dependencies: everything that the operation queued must come before what writes its result.

`torch.cuda.CUDAGraph.debug_dump` writes a graph in the DOT language. One more piece of work is queued on the current
stream after the operation's, as whatever reads the result would be. If a node does not lead to it, replaying the graph
may finish that node after the result is read: a join is missing. CUDA refuses most such captures by itself (see
`flashnorm.verify.races.capture`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flashnorm.errors import Refusal
from flashnorm.verify.races.capture import capture

_EDGE = re.compile(r'"([^"]+)"\s*->\s*"([^"]+)"')
_NODE = re.compile(r'^"([^"]+)"\s*\[(.*?)\];', re.DOTALL | re.MULTILINE)
_KERNEL = re.compile(r"([^\s|{}]+)(?:\\<){3}")  # its launch configuration follows, as \<\<\<blocks,threads,bytes\>\>\>
_LABEL = re.compile(r'label="((?:[^"\\]|\\.)*)"', re.DOTALL)


@dataclass(frozen=True)
class Graph:
    """Nodes with what they are, in the order of the file, and edges from what comes first to what waits for it."""

    nodes: dict[str, str]
    edges: frozenset[tuple[str, str]]

    def ancestors(self, node: str) -> set[str]:
        """Everything that must be done before `node`."""
        found: set[str] = set()
        waiting = [node]
        while waiting:
            current = waiting.pop()
            new = {first for first, then in self.edges if then == current} - found
            found |= new
            waiting += new
        return found

    @property
    def ends(self) -> list[str]:
        """Nodes that nothing waits for."""
        return [node for node in self.nodes if not any(first == node for first, _ in self.edges)]


def read_dot(text: str) -> Graph:
    """A graph from what CUDA's debug print writes. Raises `Refusal` where there are no nodes in it."""
    nodes = {name: _label(rest) for name, rest in _NODE.findall(text)}
    if not nodes:
        raise Refusal("no nodes were found in the graph's description; was it written by CUDAGraph.debug_dump?")
    return Graph(nodes, frozenset((a, b) for a, b in _EDGE.findall(text) if a in nodes and b in nodes))


def _label(rest: str) -> str:
    found = _LABEL.search(rest)
    return " ".join(found.group(1).replace("\\n", " ").split()) if found else ""


def unjoined(graph: Graph) -> list[str]:
    """What nothing waits for, but for the last node, the reader: each is work that the result does not depend on."""
    return [_name(graph.nodes[node]) for node in graph.ends[:-1]]


def _name(label: str) -> str:
    """A kernel's name, or what kind of node it is: what a reader knows it by, of a label with every parameter."""
    kernel = _KERNEL.search(label)
    return kernel.group(1) if kernel else label.strip("{}| ").split("|")[0].strip()


def captured(run: Callable[[], object], warm_up: Callable[[], object] | None = None) -> Graph:
    """Capture what `run` queues on a CUDA device, and read its graph. `warm_up` (default: `run`) is called before.

    The last node is not `run`'s: it is what comes next on the stream that was current. Raises `NotCaptured` where CUDA
    refuses the capture, and `Refusal` where torch does not write the graph.
    """
    (warm_up or run)()
    reader = torch.zeros((), device="cuda")

    def run_and_read() -> object:
        result = run()
        reader.fill_(1)
        return result

    torch.cuda.synchronize()
    graph, _ = capture(run_and_read)
    return read_dot(_described(graph))


def _described(graph: torch.cuda.CUDAGraph) -> str:
    """What CUDA writes of a captured graph. It must have kept its nodes, by `CUDAGraph(keep_graph=True)`.

    `enable_debug_mode` is no substitute: `capture_end` forgets the nodes of a graph that does not keep them in that
    mode as well, and `debug_dump` then writes nothing (pytorch#187749). It is a mode of the process, not of a graph.
    """
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*DEBUG: calling")  # `debug_dump` announces itself
        path = Path(folder) / "graph.dot"
        graph.debug_dump(str(path))
        if not path.is_file():
            raise Refusal(f"torch {torch.__version__} did not write the captured graph; use 2.10 or later, with CUDA")
        return path.read_text()


def depends_on(graph: Graph, target: str, sources: Sequence[str]) -> list[str]:
    """Those of `sources` that the last node whose label contains `target` does not depend on; each a part of a label.

    Raises `Refusal` where nothing has such a label.
    """
    targets = [node for node, label in graph.nodes.items() if target in label]
    if not targets:
        raise Refusal(f"no node of the graph is called {target!r}")
    labels = [graph.nodes[node] for node in graph.ancestors(targets[-1])]
    return [source for source in sources if not any(source in label for label in labels)]
