"""Apply a fold plan to a checkpoint on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from flashnorm.checkpoint.changes import Addition, Changes
from flashnorm.checkpoint.edit import new_bias
from flashnorm.checkpoint.engine import transform
from flashnorm.checkpoint.gains import SIDECAR, sidecar
from flashnorm.checkpoint.manifest import MANIFEST, FileRecord, Manifest, manifest_bytes
from flashnorm.checkpoint.plan import FoldPlan, changed
from flashnorm.checkpoint.source import CONFIG, Source
from flashnorm.checkpoint.staging import write_file
from flashnorm.checkpoint.stream import Sums
from flashnorm.checkpoint.tree import reading
from flashnorm.errors import CheckpointError
from flashnorm.version import __version__


def apply_plan(
    source: Source,
    plan: FoldPlan,
    dst: str | os.PathLike[str],
    *,
    sums: Mapping[str, str] = MappingProxyType({}),
    quiet: bool = True,
    workers: int | None = None,
) -> None:
    """Write `source`, changed as `plan` says, to the new folder `dst`, with its manifest and its original gains.

    Shards, tensor names, dtypes, metadata and all other files stay as they are, byte for byte where the plan does not
    touch them. `dst` appears whole or not at all; the source is only read. `sums`: SHA-256 of files of the
    source that are known already. `quiet`: no progress on stderr. `workers`:
    files in flight at once (None: as many as there are cores). Raises `OutputError` where `dst` exists, overlaps the
    source or does not fit on its disk, and `CheckpointError` where the plan does not fit the source, a gain is not
    finite, or a weight overflows.
    """
    taken = [name for name in (MANIFEST, SIDECAR) if name in source.files]
    if taken:
        raise CheckpointError(
            f"{source.folder} has a {taken[0]}: it is folded already; use it, or `flashnorm unfold` it"
        )
    additions = {
        name: Addition(source.tensors[origin].shard, source.tensors[origin]) for name, origin in plan.additions.items()
    }
    for name, bias in plan.new_biases.items():
        shifts = plan.edits[name].shifts if name in plan.edits else ()
        additions[name] = Addition(source.tensors[bias.weight].shard, new_bias(source, name, bias, shifts))
    changes = Changes(plan.edits, additions, _new_config(source, plan.config_changes))
    gains, sites, originals = sidecar(source, plan)

    def finish(folder: Path, done: Mapping[str, Sums]) -> None:
        write_file(folder, SIDECAR, gains)
        output = {name: FileRecord(s.output, s.output_size) for name, s in done.items() if not s.vanished}
        output[SIDECAR] = FileRecord(hashlib.sha256(gains).hexdigest(), len(gains))
        manifest = Manifest(
            tool_version=__version__,
            mode=plan.mode,
            untied=plan.untied,
            source={name: FileRecord(s.source, s.source_size) for name, s in sorted(done.items())},
            output=dict(sorted(output.items())),
            sites=sites,
            skipped=plan.skipped,
            originals=originals,
            added=tuple(additions),
            removed=tuple(name for name, edit in plan.edits.items() if edit.remove),
            config=_config_text(source) if changes.config is not None else None,
            new_biases=tuple(plan.new_biases),
            lost=dict(sorted(item for s in done.values() for item in s.lost.items())),
        )
        write_file(folder, MANIFEST, manifest_bytes(manifest))

    transform(
        source,
        changes,
        Path(dst),
        finish,
        what="fold",
        extra_bytes=len(gains),
        known=sums,
        quiet=quiet,
        workers=workers,
    )


def _config_text(source: Source) -> str:
    path = source.folder / CONFIG
    with reading(path):
        return path.read_bytes().decode("utf-8", "surrogateescape")


def _new_config(source: Source, config_changes: Mapping[tuple[str, ...], object]) -> bytes | None:
    """The text of `config.json` with the changes in it; None where there are none."""
    if not config_changes:
        return None
    return (json.dumps(changed(source.config, config_changes), indent=2, ensure_ascii=False) + "\n").encode()
