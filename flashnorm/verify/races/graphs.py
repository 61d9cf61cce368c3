"""A captured graph's dependencies: everything that the operation queued must come before what writes its result.

`torch.cuda.CUDAGraph.debug_dump` writes a graph in the DOT language. If a node does not lead to the last one, replaying
the graph may finish it after the result is read: a join is missing. The implicit join of two streams shows so: the
product depends on the matmul and not on the sum of squares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flashnorm.errors import Refusal

_EDGE = re.compile(r'"([^"]+)"\s*->\s*"([^"]+)"')
_NODE = re.compile(r'^"([^"]+)"\s*\[(.*?)\];', re.DOTALL | re.MULTILINE)
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
    """What nothing waits for, but for the last node: each is work that the result does not depend on."""
    return [graph.nodes[node] for node in graph.ends[:-1]]


def captured(run: Callable[[], object], warm_up: Callable[[], object] | None = None) -> Graph:
    """Capture what `run` queues on a CUDA device, and read its graph. `warm_up` (default: `run`) is called before."""
    (warm_up or run)()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        graph.debug_dump(str(path))
        return read_dot(path.read_text())


def depends_on(graph: Graph, target: str, sources: Sequence[str]) -> list[str]:
    """Those of `sources` that the last node whose label contains `target` does not depend on; each a part of a label.

    Raises `Refusal` where nothing has such a label.
    """
    targets = [node for node, label in graph.nodes.items() if target in label]
    if not targets:
        raise Refusal(f"no node of the graph is called {target!r}")
    labels = [graph.nodes[node] for node in graph.ancestors(targets[-1])]
    return [source for source in sources if not any(source in label for label in labels)]
