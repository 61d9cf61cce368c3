"""The settings of a folded folder: those of its source, but for the few that folding writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flashnorm.checkpoint.plan import changed
from flashnorm.checkpoint.source import CONFIG, Source
from flashnorm.checkpoint.tree import read_json
from flashnorm.verify.report import Check

GENERATION_CONFIG = "generation_config.json"
_SHOWN = 5
# Who saved the file and what it was called then: no model depends on these.
_ORIGIN = ("transformers_version", "_name_or_path")
_ABSENT = object()


def settings_check(source: Source, folded: Source, changes: Mapping[tuple[str, ...], object]) -> Check:
    """Compare `config.json`, with the fold's own `changes` to it, and `generation_config.json`.

    The figure counts the settings that differ, those that only one of the two has included; a failure names them.
    """
    names = [f"{CONFIG} {key}" for key in differing_settings(changed(source.config, changes), folded.config)]
    names += [
        f"{GENERATION_CONFIG} {key}"
        for key in differing_settings(_generation_config(source), _generation_config(folded))
    ]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return Check("settings", len(names), 0, f"settings differ that folding does not change: {shown}")


def differing_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The keys in which two JSON objects differ, with dots between those of nested ones."""
    return [".".join(path) for path in _differing(ours, theirs) if path[-1] not in _ORIGIN]


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key in sorted({*ours, *theirs}):
        mine, other = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if isinstance(mine, dict) and isinstance(other, dict):
            yield from ((key, *path) for path in _differing(mine, other))
        elif type(mine) is not type(other) or mine != other:  # 1, 1.0 and true are equal in Python
            yield (key,)


def _generation_config(folder: Source) -> dict[str, Any]:
    """Empty where there is none: then generation goes by the defaults, as with a file that says nothing."""
    return read_json(folder.folder / GENERATION_CONFIG) if GENERATION_CONFIG in folder.files else {}
