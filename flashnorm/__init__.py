"""FlashNorm for any transformer: fold norm gains into the next weights, prove that nothing changed, run it fast.

Public names load their room on first use, so that `import flashnorm` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flashnorm.version import __version__

# Public name -> the module that defines it.
_EXPORTS = {
    "Acceleration": "flashnorm.runtime.report",
    "AuditReport": "flashnorm.sites.audit",
    "BatteryReport": "flashnorm.verify.outcome",
    "CancelReport": "flashnorm.passes.cancel",
    "CenterReport": "flashnorm.passes.center",
    "FoldReport": "flashnorm.sites.folding",
    "HashReport": "flashnorm.checkpoint.hashes",
    "ImportReport": "flashnorm.checkpoint.gguf_import",
    "LoraReport": "flashnorm.checkpoint.lora",
    "UnfoldReport": "flashnorm.checkpoint.unfold",
    "VerifyReport": "flashnorm.verify.report",
    "accelerate": "flashnorm.runtime.accelerate",
    "audit": "flashnorm.sites.audit",
    "battery": "flashnorm.verify.suite",
    "cancel": "flashnorm.passes.cancel",
    "center": "flashnorm.passes.center",
    "center_checkpoint": "flashnorm.checkpoint.center",
    "fold": "flashnorm.passes.fold",
    "fold_checkpoint": "flashnorm.checkpoint.fold",
    "import_gguf": "flashnorm.checkpoint.gguf_import",
    "load": "flashnorm.checkpoint.load",
    "rms_linear": "flashnorm.kernels.ops",
    "translate_lora": "flashnorm.checkpoint.lora",
    "unfold_checkpoint": "flashnorm.checkpoint.unfold",
    "verify_hashes": "flashnorm.checkpoint.hashes",
}

__all__ = ["__version__", "verify", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "verify":  # a package that can be called; importing any part of it binds it to this name
        return import_module("flashnorm.verify")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
