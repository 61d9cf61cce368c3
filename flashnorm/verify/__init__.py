"""The battery: does the candidate compute what the reference computes, and how far is each from the exact answer?

`flashnorm.verify` is this package and the public function at once, from the first access on: importing a submodule
binds the package to that name, whatever `flashnorm` exports under it, so the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, reference: Any, candidate: Any, **options: Any) -> Any:
        """Compare `candidate` with `reference`: see `flashnorm.verify.battery.verify`."""
        from flashnorm.verify.battery import verify

        return verify(reference, candidate, **options)


sys.modules[__name__].__class__ = _CallablePackage
