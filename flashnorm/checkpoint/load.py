"""`flashnorm.load`: a Transformers model from any checkpoint folder, strict folded ones included."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flashnorm.checkpoint.manifest import Manifest, is_folded, read_manifest
from flashnorm.errors import CheckpointError
from flashnorm.sites.build import model_class, read_config
from flashnorm.sites.tying import tied_groups


def load(folder: str | os.PathLike[str], *, trust_remote_code: bool = False, **options: Any) -> nn.Module:
    """Load a checkpoint folder with stock `from_pretrained`; in a strict folded one, set the absent gains to one.

    `options` go to `from_pretrained` (dtype, device_map, ...). Raises `ConfigError` where the model cannot be built and
    `CheckpointError` where weights other than the folded gains are missing.
    """
    cls = model_class(read_config(folder, trust_remote_code), trust_remote_code)
    if hasattr(cls, "from_config"):
        options["trust_remote_code"] = trust_remote_code
    manifest = read_manifest(folder) if is_folded(folder) else None
    if manifest is None or manifest.mode != "strict":
        return cls.from_pretrained(folder, **options).eval()
    with _missing_unreported():
        model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
    _set_identity(model, manifest, set(info["missing_keys"]))
    return model.eval()


@contextmanager
def _missing_unreported() -> Iterator[None]:
    """Keeps the loader from warning of the gains that strict mode removed; anything else missing is refused after."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_without_missing)
    try:
        yield
    finally:
        logger.removeFilter(_without_missing)


def _without_missing(record: logging.LogRecord) -> bool:
    """Takes the missing weights out of Transformers' loading report, and all of it where nothing else is in it."""
    report = record.getMessage()
    if "LOAD REPORT" not in report:
        return True
    lines = [line for line in report.splitlines() if "MISSING" not in line]
    record.msg, record.args = "\n".join(lines), ()
    return any(status in line for line in lines for status in ("UNEXPECTED", "MISMATCH", "CONVERSION"))


def _set_identity(model: nn.Module, manifest: Manifest, missing: set[str]) -> None:
    """The gains that strict mode removed become one, whatever the loader put in their place.

    Norms that share a gain are one site, under the name of the first; the loader misses it under each of its names.
    """
    groups = {name: group for group in tied_groups(model) for name in group}
    for site in manifest.sites:
        own = [n for n in missing if n.rpartition(".")[0] == site.norm]
        if len(own) != 1:
            raise CheckpointError(f"{site.norm} should lack exactly its gain, but the loader misses {own or 'nothing'}")
        with torch.no_grad():
            model.get_parameter(own[0]).fill_(1.0 - site.offset)
        missing.difference_update(groups[own[0]])
    if missing:
        raise CheckpointError(f"the folder lacks {sorted(missing)[0]} and {len(missing) - 1} more; it is damaged")
