"""Calls that CUPYATTN_DUMP saved, run again here: on the CPU by the reference, and on a GPU."""

from __future__ import annotations

import functools
import importlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import array
from ..core.cupy_module import cupy_module
from ..core.device import device_props
from ..errors import ArgumentError
from .dump import SCHEMA
from .encoding import Decoder, NotSavedError
from .launches import watched
from .words import all_leaves, is_array

_PACKAGE = __name__.partition(".")[0]
_WORKSPACE = "workspace"


@dataclass(frozen=True)
class Difference:
    """How far an array is from the reference.

    relative   ‖error‖ / ‖reference‖
    largest    the largest absolute error, `at` this index, where the array has `got` and the
               reference `wanted`
    unlike     elements that are NaN or infinite in one of the two alone
    """

    name: str
    relative: float
    largest: float
    at: tuple[int, ...]
    got: float
    wanted: float
    unlike: int

    def __str__(self) -> str:
        text = f"{self.name}: error {self.relative:.3g} of the whole"
        if self.largest:
            at = ", ".join(map(str, self.at))
            text += f", at most {self.largest:.4g} at [{at}] ({self.got:.6g} for {self.wanted:.6g})"
        return text + (f", {self.unlike:,} NaN or infinite in one alone" if self.unlike else "")


@dataclass
class Run:
    """A call that ran: `where`, its launches, arrays by name, or the error that it raised."""

    where: str
    launches: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    error: str = ""


@dataclass
class Replay:
    """What `replay` gives. differences: of runs to the reference, by where they ran."""

    facts: dict[str, Any]
    reference: Run
    runs: list[Run]
    differences: dict[str, list[Difference]]


class SavedCall:
    """A call in files.

    Raises ArgumentError for files that are no saved call, or one of another release's form.
    """

    def __init__(self, path: Path) -> None:
        self.facts = _read(path)
        if self.facts.get("schema") != SCHEMA:
            raise ArgumentError(
                f"{path}: its form is {self.facts.get('schema')!r}, and this is cupyattn with form "
                f"{SCHEMA}; use the release that saved it, {self.facts.get('cupyattn', '?')}"
            )
        self._arrays = _read_arrays(path.with_suffix(".npz"))
        result = path.with_suffix(".result.json")
        self.result = _read(result) if result.exists() else {}
        arrays = path.with_suffix(".result.npz")
        self._result_arrays = _read_arrays(arrays) if arrays.exists() else {}

    @functools.cached_property
    def _has_gpu_arrays(self) -> bool:
        return '"device": "cuda' in json.dumps(self.facts)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The calls that lead to the one that was saved, which is the last."""
        steps: list[dict[str, Any]] = self.facts["steps"]
        return steps

    def recorded(self) -> Run | None:
        """What was recorded where the call was saved; None for one that did not return."""
        if not self.result:
            return None
        device = self.result.get("device") or "cpu"
        run = Run(f"recorded on {'the CPU' if device == 'cpu' else device}")
        if "error" in self.result:
            run.error = f"{self.result['error']}: {self.result['message']}"
            return run
        run.launches = [launch for launch, _ in self.result["launches"]]
        if self._result_arrays:
            decoder = Decoder(self.result, self._result_arrays, [], lambda device: "cpu")
            result = decoder.decode(self.result["result"])
            written = {name: decoder.decode(x) for name, x in self.result["written"].items()}
            run.arrays = _arrays_of(result, written)
        return run

    def run(self, device: str) -> Run:
        """Make the call on "cpu" or "cuda".

        Raises ArgumentError for arguments that no file holds. What the call itself raises is kept.
        """
        index = 0 if device == "cuda" else -1
        run = Run(f"here on {device_props(index).name}" if device == "cuda" else "the reference")
        wrappers: list[Any] = []
        with watched(device == "cuda") as launches:
            try:
                result: Any = None
                arguments: dict[str, Any] = {}
                for step in self.steps:
                    result, arguments = self._make(step, wrappers, device)
                if device == "cuda":
                    cupy_module().cuda.Device(index).synchronize()
                run.arrays = _arrays_of(result, arguments if result is None else {})
            except NotSavedError:
                raise
            except Exception as error:  # the call's own, which may be what it was saved for
                run.error = f"{type(error).__name__}: {error}"
        run.launches = [str(launch) for launch in launches]
        return run

    def _make(
        self, step: dict[str, Any], wrappers: list[Any], device: str
    ) -> tuple[Any, dict[str, Any]]:
        """The result and the arguments of a step; one that makes a wrapper adds it."""

        def device_of(recorded: str) -> str:
            # What was on the host beside arrays on a GPU stays there.
            return "cpu" if recorded == "cpu" and self._has_gpu_arrays else device

        decoder = Decoder(step, self._arrays, wrappers, device_of)
        positional = [(name, decoder.decode(x)) for name, x in step["positional"]]
        by_name = {name: decoder.decode(x) for name, x in step["by_name"].items()}
        function, args = _function(step), [x for _, x in positional]
        if step["function"].endswith("__init__"):
            wrappers.append(function(*args, **by_name))
            return None, {}
        result = function(*_owner(step, wrappers), *args, **by_name)
        return result, {**dict(positional), **by_name}


def _owner(step: dict[str, Any], wrappers: list[Any]) -> list[Any]:
    return wrappers[-1:] if step["class"] is not None else []


def _function(step: dict[str, Any]) -> Any:
    """The public call that a step names, or the class whose object it makes."""
    if step["class"] is not None:
        module, _, path = step["class"].partition(":")
        owner = _resolve(module, path)
        last = step["function"].rpartition(".")[2]
        function = getattr(owner, last, None)
        target = owner if last == "__init__" else function
    else:
        function = target = _resolve(step["module"], step["function"])
    if not hasattr(function, "_torchdynamo_disable") and not hasattr(function, "is_observed"):
        raise NotSavedError(f"{step['name']}: is no public call of this cupyattn")
    return target


def _resolve(module: str, path: str) -> Any:
    """What a module of this package defines; None if there is nothing of that name."""
    if module.partition(".")[0] != _PACKAGE:
        return None
    try:
        x: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        x = getattr(x, part, None)
    return x


def replay(path: Path, device: str | None) -> Replay:
    """Run a saved call by the reference, on a GPU if there is one (`device` "cpu": in no case), and
    compare these and what was recorded.

    Raises ArgumentError as SavedCall does.
    """
    call = SavedCall(path)
    reference = call.run("cpu")
    runs = [x for x in (call.recorded(),) if x is not None]
    if device != "cpu" and (device == "cuda" or _has_gpu()):
        runs.append(call.run("cuda"))
    differences = {run.where: compare(run.arrays, reference.arrays) for run in runs}
    return Replay(call.facts, reference, runs, differences)


def _has_gpu() -> bool:
    try:
        cupy = cupy_module()
        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, or one that does not work
        return False


def compare(arrays: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[Difference]:
    """Differences of arrays of one name and shape, in their order; of arrays of numbers alone."""
    return [
        _difference(name, x, wanted[name])
        for name, x in arrays.items()
        if name in wanted and x.shape == wanted[name].shape and x.size
    ]


def _difference(name: str, got: np.ndarray, wanted: np.ndarray) -> Difference:
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    is_finite = np.isfinite(a) & np.isfinite(b)
    # Both -inf, as the LSE of a row without keys, or both NaN: alike.
    unlike = ~is_finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    error = np.where(is_finite, np.abs(np.where(is_finite, a, 0) - np.where(is_finite, b, 0)), 0)
    at = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    whole = math.sqrt(float(np.square(b[is_finite]).sum()))
    relative = math.sqrt(float(np.square(error).sum()))
    relative = relative / whole if whole else relative
    largest, count = float(error[at]), int(np.count_nonzero(unlike))
    return Difference(name, relative, largest, at, float(a[at]), float(b[at]), count)


def _arrays_of(result: Any, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """Copies of all arrays in a result, or of the arguments of a call without one."""
    return {
        name: np.array(array.to_host(array.view(x, name)))
        for name, x in all_leaves([("output", result), *arguments.items()])
        if is_array(x) and _WORKSPACE not in name
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ArgumentError(f"{path}: is not a saved call; name a .json of a dump") from error
    if not isinstance(facts, dict):
        raise ArgumentError(f"{path}: is not a saved call; name a .json of a dump")
    return facts


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error}); it belongs to the dump") from error
    except Exception as error:  # of a file that ends early, or holds other things
        raise ArgumentError(f"{path}: is damaged ({error}); the process may have ended") from error
