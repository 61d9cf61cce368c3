"""The worked example: a trained model out of a GGUF, audited, folded, verified, and one table at the end.

Usage: `python -m examples.demo FOLDER`. Every step writes its result whole or not at all, so that an interrupted demo
goes on where it stopped, and a finished one only shows its table again. Exit status 1 when the verification failed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashnorm
from examples.assets import AssetError, smollm2_gguf, sotu_text
from examples.table import show
from flashnorm.errors import FlashnormError
from flashnorm.verify.report import VerifyReport

# Half of what `flashnorm verify` takes by default: with two cores the whole demo stays below three minutes.
POSITIONS, TOKENS, NEW_TOKENS = 128, 2048, 48


@dataclass(frozen=True)
class Places:
    """What the demo leaves in its folder."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def folded(self) -> Path:
        return self.root / "folded"

    @property
    def result(self) -> Path:
        return self.root / "result.json"


def main(places: Places) -> int:
    places.root.mkdir(parents=True, exist_ok=True)
    if places.source.exists():
        _say(f"{places.source} exists: not imported again")
    else:
        _say(f"importing SmolLM2-135M-Instruct to {places.source}")
        flashnorm.import_gguf(smollm2_gguf(), places.source)
    if places.folded.exists():
        _say(f"{places.folded} exists: not folded again")
    else:
        _say(f"folding it to {places.folded}")
        flashnorm.fold_checkpoint(places.source, places.folded)
    result = _read(places.result)
    if result is not None:
        _say(f"{places.result} exists: not verified again")
    else:
        result = _examine(places)
        _write(places.result, result)
    show(result, places.folded)
    return 0 if result["verify"]["passed"] else 1


def _examine(places: Places) -> dict[str, Any]:
    _say("auditing the source")
    audit = flashnorm.audit(places.source)
    report = flashnorm.verify(
        places.source,
        places.folded,
        text=sotu_text(),
        positions=POSITIONS,
        tokens=TOKENS,
        new_tokens=NEW_TOKENS,
        progress=_say,
    )
    return {
        "norms": len(audit.foldable) + len(audit.blocked),
        "folded": [site.norm for site in audit.foldable],
        "skipped": audit.skipped,
        "verify": report.to_dict(),
    }


def _read(path: Path) -> dict[str, Any] | None:
    """The finished result; None where there is none, or one with other figures by another version."""
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    try:
        VerifyReport.from_dict(result["verify"])
    except KeyError:
        return None
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2))
    partial.rename(path)


def _say(step: str) -> None:
    print(f"demo: {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(Places(Path(sys.argv[1]))))
    except (AssetError, FlashnormError) as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)
