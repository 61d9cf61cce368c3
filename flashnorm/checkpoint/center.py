"""`flashnorm.center_checkpoint`: the same centering for a checkpoint folder, written to a new one.

A checkpoint says nothing of mean subtraction, so the new folder still has LayerNorms, which subtract means of zero:
stock loaders run it as it is, and `flashnorm.center` makes RMSNorms of them without changing a weight any further.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from flashnorm.checkpoint.load import load
from flashnorm.checkpoint.manifest import is_folded
from flashnorm.checkpoint.plan import changed
from flashnorm.checkpoint.prepare import refuse_another_function
from flashnorm.checkpoint.saving import write_model
from flashnorm.checkpoint.source import CONFIG, Source, open_source
from flashnorm.checkpoint.staging import check_output, copy_file
from flashnorm.checkpoint.tree import file_size
from flashnorm.errors import Refusal
from flashnorm.passes.center import CenterReport, apply_center, report_of
from flashnorm.sites.audit import trace_fully
from flashnorm.sites.build import hollow_model, read_config
from flashnorm.sites.centering import audit_centering
from flashnorm.sites.tying import has_tied_head, tie_flags, untie_head


def center_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    untie: bool = False,
    trust_remote_code: bool = False,
) -> CenterReport:
    """Center the checkpoint folder `src` and write the result to the new folder `dst`.

    `dst` appears whole or not at all. Weights are centered, biases of LayerNorms move and become zero, each rounded
    once to the stored dtype; all other files are copied. `untie`: as for `flashnorm.center`, and the config says so.
    Takes memory for the whole model in its stored dtype. Raises `Refusal` (with its subclasses) where `src` is folded
    or damaged, has a head that cannot be untied, or nothing in it can be centered; nothing is written then.
    """
    if is_folded(src):
        raise Refusal(f"{src} is folded already; center the checkpoint that it was folded from, then fold the result")
    source = open_source(src)
    check_output(source.folder, Path(dst))
    config = _config(source, untie, trust_remote_code)
    model = load(source.folder, trust_remote_code=trust_remote_code, dtype="auto")
    audit = audit_centering(model, untie=untie)
    chosen = [c for c in audit.centerings if c.centerable]
    if not chosen:
        first = next((f"{c.norm}: {c.reason}" for c in audit.centerings), "it has no norms")
        raise Refusal(f"nothing in {source.folder} can be centered ({first}); see `flashnorm audit`")
    untied = apply_center(model, chosen, audit, untie=untie, keep_modules=True)
    weights = {shard.name for shard in source.shards} | {source.index, CONFIG}
    others = [name for name in source.files if name not in weights]

    def beside(folder: Path) -> None:
        for name in others:
            (folder / name).unlink(
                missing_ok=True
            )  # what the model has written of its own, such as generation settings
            copy_file(source.folder / name, folder, name)
        source.check_unchanged()

    extra = sum(file_size(source.folder / name) for name in others)
    write_model(cast(PreTrainedModel, model), Path(dst), beside, config, extra)
    return report_of(audit, untied)


def _config(source: Source, untie: bool, trust_remote_code: bool) -> bytes:
    """`config.json` as the new folder has it."""
    stored = (source.folder / CONFIG).read_bytes()
    if not untie:
        return stored
    config = read_config(source.folder, trust_remote_code)
    model = hollow_model(config, trust_remote_code)
    if not has_tied_head(model):
        raise Refusal(f"{source.folder} has no tied head, so there is nothing to untie; leave --untie out")
    new = changed(source.config, tie_flags(config, source.config))
    untie_head(model)
    refuse_another_function(source, trace_fully(model), hollow_model(type(config).from_dict(new), trust_remote_code))
    return (json.dumps(new, indent=2, ensure_ascii=False) + "\n").encode()
