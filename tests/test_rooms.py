"""Every folder of the package imports only what lies below it, also inside functions and for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "flashnorm"
# Folder, or module beside the folders -> what lies directly below it; what lies below that may be imported as well.
BELOW = {
    "version": (),
    "errors": (),
    "folders": ("errors",),
    "algebra": ("errors",),
    "attention_algebra": ("algebra",),
    "sites": ("algebra", "folders"),
    "passes": ("sites",),
    "checkpoint": ("passes", "version"),
    "kernels": ("algebra",),
    "runtime": ("kernels", "passes", "attention_algebra"),
    "verify": ("runtime", "checkpoint"),
    "bench": ("verify",),
    "cli": ("bench", "__init__"),
    # The entrances. The package itself gives out names of every folder, so only what lies above all may import it.
    "__init__": ("version",),
    "__main__": ("cli",),
    "pytest_plugin": ("verify", "__init__"),
}


def below(room: str) -> set[str]:
    """All that `room` may import."""
    return {room, *(deeper for next_one in BELOW[room] for deeper in below(next_one))}


def imported(source: str) -> Iterator[str]:
    """The folders and modules of the package that a file imports."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "say the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *inner = name.split(".")
            if package == "flashnorm":
                yield inner[0] if inner and inner[0] in BELOW else "__init__"


def wrong(room: str, source: str) -> set[str]:
    """What a file of `room` imports although it does not lie below."""
    return set(imported(source)) - below(room)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert {room_of(file) for file in files} == set(BELOW)
    found = {str(file.relative_to(PACKAGE)): wrong(room_of(file), file.read_text()) for file in files}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


def test_an_import_that_points_up_is_seen() -> None:
    """Wherever it stands, and however it is written."""
    assert wrong("sites", "from flashnorm.passes.fold import fold") == {"passes"}
    assert wrong("sites", "def f():\n    import flashnorm.passes.fold") == {"passes"}
    assert wrong("passes", "if TYPE_CHECKING:\n    from flashnorm import checkpoint") == {"checkpoint"}
    assert wrong("kernels", "from flashnorm.sites.types import Site") == {"sites"}  # beside it, not below
    assert wrong("runtime", "import flashnorm") == {"__init__"}
    assert wrong("runtime", "from flashnorm import fold") == {"__init__"}
    assert wrong("checkpoint", "from flashnorm import algebra\nimport torch") == set()
