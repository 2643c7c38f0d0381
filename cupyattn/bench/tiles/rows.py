"""Rows of measured candidates: one JSON line each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...choose import old_names
from .case import TileCase

# What a row says of its batch; all else of a TileCase has one value in all of them.
_FIELDS = (
    "name",
    "api",
    "requests",
    "page_size",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim_qk",
    "head_dim_vo",
    "causal",
    "pos_encoding_mode",
    "logits_soft_cap",
    "kv_dtype",
    "has_mask",
)
# Rows that were written before there were masks have these values.
_DEFAULTS = {"has_mask": False}


@dataclass(frozen=True)
class Row:
    """What one candidate of a batch took.

    card, clock  the name of the card, and its highest clock in MHz
    us           the median of the samples
    told         what the card's data said before, in microseconds; None where nothing
    is_chosen    whether a plan took it then
    between      what lay between the samples beside a flush of L2: "code", other kernels'; empty in
                 rows that were measured before it did
    """

    card: str
    clock: float
    commit: str
    case: TileCase
    candidate: str
    us: float
    told: float | None
    is_chosen: bool
    between: str = ""


def write(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(line(row) + "\n")


def line(row: Row) -> str:
    case = asdict(row.case)
    data = {**asdict(row), "case": {name: case[name] for name in _FIELDS}}
    return json.dumps(data, separators=(",", ":"))


def read(path: Path) -> list[Row]:
    """The rows of a file. ValueError with the line that is none."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    result = []
    for number, text in enumerate(lines, 1):
        try:
            data: dict[str, Any] = json.loads(text)
            stored = _DEFAULTS | data["case"]
            case = {name: stored[name] for name in _FIELDS}
            requests = tuple(tuple(request) for request in case["requests"])
            head_dims = case["head_dim_qk"], case["head_dim_vo"]
            data["candidate"] = old_names.candidate(data["candidate"], case["api"], head_dims)
            result.append(Row(**{**data, "case": TileCase(**{**case, "requests": requests})}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: this is no row of a candidate ({error})") from error
    return result
