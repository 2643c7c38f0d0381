"""The result file: JSON, rewritten whole after every case, so a run that dies leaves what it had.

    {"header": {...}, "ceilings": {"tflops", "gbps"}, "rows": [...], "cases": {name: summary},
     "lost": [{"case", "label", "stage", "reason"}]}

A row is one implementation of one case; its status is timed, wrong (timed, but its answer failed
the check), failed, unsupported or skipped. `lost` names what took the process down; it is left out
when a fresh process goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .batch.case import BatchCase
from .cases import AnyCase
from .oracle import Verdict
from .peers import OURS
from .timing import Timing

FILE_NAME = "results.json"
_MOST_GROUPS = 20  # of equal requests, in a summary


class Results:
    """The result file in memory; `save` replaces the file in one step."""

    def __init__(self, path: Path, save_seconds: float = 0.0) -> None:
        self.path = path
        self._save_seconds = save_seconds
        self._saved = -math.inf
        self.data: dict[str, Any] = {"rows": [], "cases": {}, "lost": []}
        if path.exists():
            self.data |= json.loads(path.read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.data["rows"]
        return rows

    def finished(self, case: AnyCase) -> bool:
        return case.name in self.data["cases"]

    def why_lost(self, case: AnyCase, label: str) -> str | None:
        """The reason why an implementation ("peer" or "peer:variant") must not run again."""
        for entry in self.data["lost"]:
            if entry["case"] in (case.name, "*") and entry["label"] == label:
                return f"took the process down in {entry['stage']}: {entry['reason']}"
        return None

    def add_case(self, case: AnyCase, rows: list[dict[str, Any]], **facts: Any) -> None:
        """Store a case's rows and its summary; best peer over ours goes into our rows too."""
        summary = asdict(case) | summarise(case, rows) | facts
        if isinstance(case, BatchCase) and len(case.requests) > _MOST_GROUPS:
            # A sweep draws hundreds of lengths a case; its seed and name give them again.
            kv_lens = sorted(case.kv_lens)
            summary["requests"] = {
                "count": case.batch,
                "query_rows": sum(case.q_lens),
                "keys": sum(kv_lens),
                "kv_len_min_median_max": [kv_lens[0], kv_lens[len(kv_lens) // 2], kv_lens[-1]],
            }
        for row in rows:
            if row["peer"] == "ours":
                row["best_peer_over_ours"] = summary["best_peer_over_ours"]
        self.rows.extend(rows)
        self.data["cases"][case.name] = summary

    def save_soon(self) -> None:
        """`save`, unless the last one was less than `save_seconds` ago."""
        if time.monotonic() - self._saved >= self._save_seconds:
            self.save()

    def save(self) -> None:
        text = json.dumps(_strict(self.data), indent=1, allow_nan=False)
        part = self.path.with_suffix(".part")
        part.write_text(text)
        part.replace(self.path)
        self._saved = time.monotonic()


def bare_row(
    case: AnyCase, peer: str, variant: str, status: str, reason: str = ""
) -> dict[str, Any]:
    """A row with no time: why it failed, was not supported or was skipped."""
    row: dict[str, Any] = {
        "case": case.name, "op": case.op, "peer": peer, "variant": variant, "status": status,
    }  # fmt: skip
    return row | ({"reason": reason} if reason else {})


def timed_row(
    case: AnyCase,
    peer: str,
    variant: str,
    timing: Timing,
    verdict: Verdict,
    repeatable: bool,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """The row of a timed call. Times in µs; `floor_us` by the ceilings measured in this run."""
    row = bare_row(case, peer, variant, "timed" if verdict.ok else "wrong")
    us = timing.percentile(50)
    row |= {
        "us": us,
        "p10": timing.percentile(10),
        "p90": timing.percentile(90),
        "samples": len(timing.samples),
        "relative_error": verdict.relative,
        "max_abs_error": verdict.max_abs,
        "repeatable": repeatable,
    }
    if not verdict.ok:
        row["reason"] = f"relative error {verdict.relative:.2e}"
    if not case.is_host:
        floor = case.floor_us(ceilings["tflops"], ceilings["gbps"])
        row |= {
            "tflops": case.quoted_flops / us / 1e6,
            "gbps": case.bytes / us / 1e3,
            "floor_us": floor,
            "of_floor": floor / us,
        }
    return row


def summarise(case: AnyCase, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours against the best correct peer, and against each goal of the case."""
    timed = [row for row in rows if row["status"] == "timed"]
    ours = _fastest(timed, lambda peer: peer == "ours")
    best = _fastest(timed, lambda peer: peer not in OURS)
    goals = []
    for peer, factor in case.goals:
        name, _, variant = peer.partition(":")
        meant = [row for row in timed if variant in ("", row["variant"])]
        row = _fastest(meant, lambda result, wanted=name: result == wanted)  # type: ignore[misc]
        row = best if name == "best" else row
        ratio = row["us"] / ours["us"] if row and ours else None
        met = None if ratio is None else ratio >= factor
        goals.append({"peer": peer, "factor": factor, "ratio": ratio, "met": met})
    if case.host_goal_us is not None:
        met = None if ours is None else ours["us"] <= case.host_goal_us
        goals.append({"host_us": case.host_goal_us, "ratio": ours and ours["us"], "met": met})
    return {
        "pairs": case.pairs,
        "flops": case.flops,
        "bytes": case.bytes,
        "ours_us": ours and ours["us"],
        "best_peer": best and f"{best['peer']}:{best['variant']}",
        "best_peer_us": best and best["us"],
        "best_peer_over_ours": best["us"] / ours["us"] if best and ours else None,
        "goals": goals,
    }


def _fastest(rows: list[dict[str, Any]], wanted: Callable[[str], bool]) -> dict[str, Any] | None:
    return min(
        (row for row in rows if wanted(row["peer"])), key=lambda row: row["us"], default=None
    )


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value
