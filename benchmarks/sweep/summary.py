"""What a sweep says: best peer's time over ours, in all, by group, and the worst shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ..batch.case import BatchCase
from .draw import model_of, schedule_of
from .groups import judge
from .groups import lines_of as lines_of_groups
from .predict import as_on, predict
from .profiles import lines_of

_WORST = 10


def summarise_sweep(cases: Iterable[BatchCase], results: dict[str, Any]) -> dict[str, Any]:
    """Figures of the drawn cases from the result file of their run.

    `ratio` is the best correct peer's median over ours. Cases without a peer, without us, or not
    reached are counted and in no figure.
    """
    drawn = list(cases)
    device = results.get("header", {}).get("device", {}).get("name", "")
    with as_on(device):
        found = _by_case(results["rows"])
        entries = [
            _entry(case, results["cases"][case.name], found.get(case.name, {}))
            for case in drawn
            if case.name in results["cases"]
        ]
    rated = [entry for entry in entries if entry["ratio"] is not None]
    wrong = [
        f"{row['case']} {row['peer']}:{row['variant']}"
        for row in results["rows"]
        if row["status"] == "wrong"
    ]
    ours = [row for row in results["rows"] if row["peer"] == "ours"]
    return {
        "drawn": len(drawn),
        "rated": len(rated),
        "without_peer": sorted(x["case"] for x in entries if x["ours_us"] and not x["best_peer"]),
        "ours_not_timed": sorted(x["case"] for x in entries if not x["ours_us"]),
        "wrong": wrong,
        "not_repeatable": sorted(x["case"] for x in ours if x.get("repeatable") is False),
        "all": figures(entry["ratio"] for entry in rated),
        "groups": judge(entries, results.get("ceilings", {}).get("gbps", math.inf)),
        "by_schedule": _by(rated, lambda entry: entry["schedule"]),
        "by_model": _by(rated, lambda entry: entry["model"]),
        "by_kv_heads": _by(rated, lambda entry: str(entry["num_kv_heads"])),
        "by_batch": _by(rated, lambda entry: _batch_class(entry["batch"])),
        "prediction": prediction_errors(entries),
        "prediction_by_kernels": _errors_by_kernels(entries),
        "worst": sorted(rated, key=lambda entry: entry["ratio"])[:_WORST],
        "shapes": rated,
    }


def figures(ratios: Iterable[float]) -> dict[str, Any]:
    """Count, geometric mean, 5th percentile (linear between ranks), least and share below 1."""
    ordered = sorted(ratios)
    if not ordered:
        return {"count": 0}
    place = 0.05 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return {
        "count": len(ordered),
        "geometric_mean": math.exp(sum(map(math.log, ordered)) / len(ordered)),
        "percentile_5": ordered[low] + (place - low) * (ordered[high] - ordered[low]),
        "least": ordered[0],
        "below_1": sum(ratio < 1 for ratio in ordered) / len(ordered),
    }


def prediction_errors(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How far the plans' predictions are from what was measured: |predicted / measured - 1|."""
    errors = sorted(
        abs(entry["predicted_us"] / entry["ours_us"] - 1)
        for entry in entries
        if entry["ours_us"] and entry["predicted_us"]
    )
    if not errors:
        return {"count": 0}
    median = _median(errors)
    within = sum(error <= 0.2 for error in errors) / len(errors)
    return {"count": len(errors), "median": median, "within_20_percent": within}


def _errors_by_kernels(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The same for each combination of kernels, and the median of estimate over measurement."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["ours_us"] and entry["predicted_us"]:
            groups.setdefault(entry["kernels"], []).append(entry)
    result = {}
    for kernels, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        ratios = sorted(entry["predicted_us"] / entry["ours_us"] for entry in group)
        result[kernels] = prediction_errors(group) | {"bias": _median(ratios)}
    return result


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def table(summary: dict[str, Any]) -> str:
    """The summary as text."""
    lines = [
        f"{summary['rated']} of {summary['drawn']} shapes rated: best peer's time / ours",
        "",
        _heading("group"),
        _line("all", summary["all"]),
    ]
    if summary["groups"]:
        lines += ["", *lines_of_groups(summary["groups"])]
    if "code" in summary:
        kb, wanted = (summary["code"][name] / 1024 for name in ("bytes", "wanted"))
        met = "met" if summary["code"]["met"] else "NOT MET"
        lines.append(f"code of a prompt of 1,024 tokens: {kb:.1f} KiB   {wanted:.0f}  {met}")
    for name in ("by_schedule", "by_kv_heads", "by_batch", "by_model"):
        lines += ["", _heading(name.replace("_", " "))]
        lines += [_line(group, result) for group, result in summary[name].items()]
    lines += ["", f"{'worst':64}{'ratio':>7}{'ours':>10}{'peer':>10}  best peer, keys"]
    for entry in summary["worst"]:
        times = f"{entry['ratio']:7.3f}{entry['ours_us']:10.1f}{entry['best_peer_us']:10.1f}"
        lines.append(f"{entry['case']:64}{times}  {entry['best_peer']}, {entry['keys']}")
    if summary.get("profiles"):
        lines += ["", "kernels of the worst: us, blocks x threads", *lines_of(summary["profiles"])]
    result = summary["prediction"]
    if result["count"]:
        lines += [
            "",
            f"prediction of {result['count']} shapes: median error {result['median']:.1%}, "
            f"{result['within_20_percent']:.0%} within 20 %",
        ]
        lines += [
            f"  {kernels:36}{x['count']:4} shapes {x['median']:.1%}; told / taken {x['bias']:.2f}"
            for kernels, x in summary["prediction_by_kernels"].items()
        ]
    for name in ("without_peer", "ours_not_timed", "wrong", "not_repeatable"):
        if summary[name]:
            lines += ["", name.replace("_", " ") + ":", *(f"  {x}" for x in summary[name])]
    return "\n".join(lines) + "\n"


def _by_case(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """For each case the fastest correct variant of each implementation: its time and error."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        of_case = found.setdefault(row["case"], {})
        if row["status"] != "timed":
            continue
        best = of_case.get(row["peer"])
        if best is None or row["us"] < best["us"]:
            of_case[row["peer"]] = {"us": row["us"], "error": row.get("relative_error", 0.0)}
    return found


def _entry(
    case: BatchCase, result: dict[str, Any], found: dict[str, dict[str, float]]
) -> dict[str, Any]:
    kv_lens, (predicted, kernels) = case.kv_lens, _predicted(case)
    return {
        "case": case.name,
        "schedule": schedule_of(case),
        "model": model_of(case),
        "batch": case.batch,
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim_qk,
        "page_size": case.page_size,
        "dtypes": f"{case.dtype}/{case.kv_dtype}",
        "query_rows": case.q_offsets[-1],
        "keys": f"{min(kv_lens)}..{max(kv_lens)}",
        "ratio": result["best_peer_over_ours"],
        "bytes": result["bytes"],
        "ours_us": result["ours_us"],
        "best_peer": result["best_peer"],
        "best_peer_us": result["best_peer_us"],
        "implementations": found,
        "predicted_us": predicted,
        "kernels": kernels,
    }


def _predicted(case: BatchCase) -> tuple[float | None, str]:
    """What the plan promises, and its candidate; None where no plan can be made on the host."""
    try:
        result = predict(case)
    except Exception:
        result = None
    return (None, "") if result is None else (result.us, result.candidate)


def _by(entries: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    groups: dict[str, list[float]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry["ratio"])
    result = {group: figures(ratios) for group, ratios in groups.items()}
    return dict(sorted(result.items(), key=lambda item: item[1]["geometric_mean"]))


def _batch_class(batch: int) -> str:
    for maximum in (1, 4, 16, 64):
        if batch <= maximum:
            return f"up to {maximum}"
    return "more"


def _heading(name: str) -> str:
    return f"{name:24}{'shapes':>8}{'mean':>8}{'5 %':>8}{'least':>8}{'below 1':>9}"


def _line(name: str, result: dict[str, Any]) -> str:
    if not result["count"]:
        return f"{name:24}{0:8}"
    numbers = (result["geometric_mean"], result["percentile_5"], result["least"])
    times = "".join(f"{number:8.3f}" for number in numbers)
    return f"{name:24}{result['count']:8}{times}{result['below_1']:9.0%}"
