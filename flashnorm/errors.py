"""The errors users meet, by what they should do about them.

Everything that `flashnorm` refuses on purpose is a `Refusal`: the input is at fault, nothing was written, and the
message says what was given and what to do instead. The command line turns it into exit status 2.
"""

from __future__ import annotations


class FlashnormError(Exception):
    """Base of every error that `flashnorm` raises on purpose."""


class Refusal(FlashnormError):
    """The input is not acceptable; nothing was written. One sentence, with what to do instead."""


class ConfigError(Refusal):
    """The model's `config.json` is missing, invalid, or of an architecture that cannot be built here."""


class CheckpointError(Refusal):
    """The checkpoint's files are incomplete, inconsistent, corrupt, quantised or unreadable."""


class OutputError(Refusal):
    """The output cannot be written: it exists, lies inside the source, or the disk is full."""


class TracingError(FlashnormError):
    """The model could not be run by the tracer; says where and why."""


class CheckFailed(FlashnormError):
    """A verification ran and its figure is outside the bound. The command line turns it into exit status 1."""


class ShapeError(FlashnormError, ValueError):
    """Two operands do not fit together."""


class DtypeError(FlashnormError, TypeError):
    """An operand's dtype is not supported, or differs from the others'."""


class DeviceError(FlashnormError, ValueError):
    """The operands lie on different devices, or on one that cannot do what is asked."""


class GradientError(FlashnormError, RuntimeError):
    """A gradient is wanted from an operation that has no backward."""


class KernelError(FlashnormError, RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


class Unsupported(FlashnormError):
    """The model computes something that this level of acceleration cannot; a sentence says what, and where."""


class CapacityError(FlashnormError):
    """A cache has no room: out of slots, of positions or of memory. Says what was asked, and what there is."""
