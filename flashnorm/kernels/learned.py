"""Configurations found on this machine, kept in the user's cache folder and read by the dispatcher.

One file for each kind of GPU and set of versions: a table that another compiler made may not hold here.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flashnorm.kernels.cache import cache_folder
from flashnorm.kernels.configs import Config, from_dict

# (K, N, gated) to rows to configuration.
Table = Mapping[tuple[int, int, bool], Mapping[int, Config]]


def table_path(device: torch.device) -> Path:
    """Where the configurations found on `device` are kept."""
    major, minor = torch.cuda.get_device_capability(device)
    parts = torch.cuda.get_device_name(device), f"sm{major}{minor}", f"torch {torch.__version__}", _triton()
    return cache_folder() / "tables" / (re.sub(r"[^A-Za-z0-9.+]+", "-", " ".join(parts)) + ".json")


def parse(text: str) -> Table:
    """A table's entries. Raises `ValueError`, `KeyError` or `TypeError` where the text is no table."""
    table: dict[tuple[int, int, bool], dict[int, Config]] = {}
    for entry in json.loads(text)["entries"]:
        shape = entry["k"], entry["n"], entry.get("gated", False)
        table.setdefault(shape, {})[entry["m"]] = from_dict(entry["config"])
    return table


def read(path: Path) -> Table:
    """The table of a file; empty where there is none, and with a warning where it is damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path} is left out, because it is no table of configurations ({error})", stacklevel=2)
        return {}


def write(path: Path, entries: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Add `entries` to a file's table, in place of what it has of the same shapes and rows; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["entries"]
    except (OSError, ValueError, KeyError, TypeError):
        before = []
    merged = {_key(entry): entry for entry in [*before, *entries]}
    text = json.dumps({**about, "entries": list(merged.values())}, indent=1) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def _key(entry: Mapping[str, Any]) -> tuple[int, int, int, bool]:
    return entry["m"], entry["k"], entry["n"], entry.get("gated", False)


def _triton() -> str:
    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:
        return "no triton"
