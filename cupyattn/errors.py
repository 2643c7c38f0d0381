"""The exception family. Each error is also the standard kind a caller would expect to catch."""

from __future__ import annotations


class CupyAttnError(Exception):
    """Base of every error this library raises on purpose."""


class ArgumentError(CupyAttnError, ValueError):
    """An argument has the wrong shape, dtype, device, layout or value."""


class ExpressionError(ArgumentError):
    """A user-written expression is wrong. `column` says where, counted from 1; 0: as a whole."""

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.column = column


class UnsupportedError(CupyAttnError, NotImplementedError):
    """The request is meaningful but this library, or this device, cannot serve it."""


class PlanError(CupyAttnError, RuntimeError, ValueError):
    """`run` does not match what was planned, nothing was planned, or a graph keeps what a new plan
    would change. FlashInfer raises ValueError for most of these."""


class WorkspaceError(CupyAttnError, ValueError):
    """A workspace is too small, misaligned or on another device."""


class CompileError(CupyAttnError, RuntimeError):
    """A kernel could not be compiled, or compiling is forbidden and the cache has no copy."""


class MissingPackageError(CupyAttnError, ModuleNotFoundError):
    """The package that an integration is for is not installed, or is another release of it."""


class DeviceError(CupyAttnError, RuntimeError):
    """CuPy, the driver or the GPU needed for this call is missing, or another rank of a group of
    GPUs is: it ended, raised or is late."""


class DistributedError(CupyAttnError, RuntimeError, ValueError):
    """The ranks of a group differ in what they call with, or the group cannot do what is asked."""
