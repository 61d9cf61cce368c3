"""Put the demo's output into the README, from its record.

Usage: `python -m tools.readme_example demo/result.json` takes a new record; without an argument the committed one is
rendered again.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console

from examples.table import WIDTH, show

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "example.json"
README = ROOT / "README.md"
_MARK = re.compile(r"(<!-- example:begin -->\n).*?(<!-- example:end -->)", re.DOTALL)


def rendered(record: Path = RECORD) -> str:
    """What `make demo` prints for this record, as a fenced block."""
    page = io.StringIO()
    show(json.loads(record.read_text()), Path("demo/folded"), Console(file=page, width=WIDTH, highlight=False))
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    return "```\n" + "\n".join(lines) + "\n```\n"


def with_example(readme: str) -> str:
    """The README's text with the example between its marks."""
    block = rendered()
    return _MARK.sub(lambda match: match.group(1) + block + match.group(2), readme)


def take(result: Path) -> None:
    """Make a demo's result the record, without the paths of the machine it ran on."""
    table = json.loads(result.read_text())
    table["verify"].update(reference="demo/source", candidate="demo/folded")
    RECORD.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        take(Path(sys.argv[1]))
    README.write_text(with_example(README.read_text()))
