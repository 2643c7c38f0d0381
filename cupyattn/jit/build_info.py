"""The facts about one compiled kernel, as build.json beside the cubin has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_KINDS: dict[str, Any] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "tuple[str, ...]": (list, tuple),
}


def _typed(data: Any, cls: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values that the dataclass `cls` takes. Raises ValueError for one missing or mistyped."""
    values = {}
    for field in fields(cls):
        if field.name in skip:
            continue
        value = data.get(field.name) if isinstance(data, Mapping) else None
        if not isinstance(value, _KINDS[str(field.type)]) or isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}")
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


@dataclass(frozen=True, slots=True)
class PtxasReport:
    """What ptxas used, in bytes except `registers` (per thread). Frames and spills cover every
    function of the program; `smem_bytes` is the static part; `warnings` are whole log lines."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    cmem_bytes: int
    warnings: tuple[str, ...]

    @property
    def spills(self) -> bool:
        return bool(self.spill_store_bytes or self.spill_load_bytes)

    @property
    def lost_performance(self) -> tuple[str, ...]:
        """The warnings by which ptxas admits a slow binary: C7508 (setmaxnreg ignored), C7510 and
        its kin (wgmma serialised)."""
        return tuple(line for line in self.warnings if "Performance Loss" in line)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """The facts about one compiled kernel. `compile_seconds` and `process_peak_rss_bytes` are those
    of the compile that filled the cache; `cached` says whether this call found it there."""

    name: str
    arch: str
    nvrtc: str
    ptxas: PtxasReport
    cubin_bytes: int
    compile_seconds: float
    process_peak_rss_bytes: int
    cached: bool

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, cached: bool) -> BuildInfo:
        """What build.json says. Raises ValueError for a fact that is missing or mistyped."""
        values = _typed(data, cls, skip=("ptxas", "cached"))
        ptxas = PtxasReport(**_typed(data.get("ptxas"), PtxasReport))
        return cls(**values, ptxas=ptxas, cached=cached)
