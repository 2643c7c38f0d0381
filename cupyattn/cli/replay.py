"""`cupyattn replay`: a call that CUPYATTN_DUMP saved, run again and compared."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import CupyAttnError
from ..observation.replay import Replay, Run, replay


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "replay",
        help="run a call again that CUPYATTN_DUMP saved, and compare it with the reference",
        description="Run a saved call by the reference on the CPU, and on a GPU if there is one. "
        "What was recorded, and what the GPU here gives, is compared with the reference.",
    )
    parser.add_argument(
        "file", type=Path, help="the .json of a saved call, with its .npz beside it"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="cpu: leave out the GPU; cuda: it must be there"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do it; 0, or 2 if the call cannot be run again."""
    try:
        result = replay(args.file, args.device)
    except CupyAttnError as error:
        print(f"cupyattn replay: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_facts(result), indent=2) if args.json else "\n".join(_lines(result)))
    return 0


def _lines(result: Replay) -> list[str]:
    facts = result.facts
    lines = [f"call       {facts['steps'][-1]['name']}"]
    lines += [f"saved      {facts['time']}, by cupyattn {facts['cupyattn']}"]
    lines += [f"after      {step['name']}" for step in facts["steps"][:-1]]
    for step in facts["steps"]:
        lines += [
            f"  {name}: {_words(x)}" for name, x in [*step["positional"], *step["by_name"].items()]
        ]
    if result.reference.error:
        lines += ["", f"reference  {result.reference.error}"]
    for each in result.runs:
        lines += ["", *_run_lines(each, result)]
    if not result.runs:
        lines += ["", "Nothing was recorded, and no GPU is here: the reference alone ran."]
    return lines


def _run_lines(each: Run, result: Replay) -> list[str]:
    lines = [each.where]
    lines += [f"  {each.error}"] if each.error else []
    lines += [f"  launched {launch}" for launch in each.launches]
    lines += [f"  {difference}" for difference in result.differences[each.where]]
    return lines


def _words(x: Any) -> str:
    """An argument as its file has it, in words."""
    if isinstance(x, dict) and "array" in x:
        about = f"{x['framework']} {x['dtype']} {x['shape']} on {x['device']}"
        missing = "" if x["elements"] != "none" else ", elements not saved"
        return f"{about}, strides {x['strides']}{missing}"
    if isinstance(x, dict) and "tuple" in x:
        return f"({', '.join(map(_words, x['tuple']))})"
    if isinstance(x, list):
        return f"[{', '.join(map(_words, x))}]"
    return str(next(iter(x.values()))) if isinstance(x, dict) else repr(x)


def _facts(result: Replay) -> dict[str, Any]:
    return {
        "call": result.facts["steps"][-1]["name"],
        "saved_by": result.facts["cupyattn"],
        "reference_error": result.reference.error or None,
        "runs": [
            {
                "where": each.where,
                "error": each.error or None,
                "launches": each.launches,
                "differences": [asdict(x) for x in result.differences[each.where]],
            }
            for each in result.runs
        ],
    }
