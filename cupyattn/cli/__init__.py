"""The `cupyattn` command: `info`, `compile`, `cache`, `explain`, `replay`, `demo`,
`bench` and `tune`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .._version import __version__
from . import bench, cache, explain, info, replay, tune
from . import compile as compiling

# What shells say of a process that SIGPIPE ends.
_BROKEN_PIPE = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status. `argv` defaults to the process's own arguments."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; what is left would fail again at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(args: list[str]) -> int:
    # argparse cannot hand options it does not know through to another parser.
    if args[:1] == ["demo"]:
        from ..demo import main as demo

        return demo(args[1:]) or 0
    parser = _parser()
    if not args:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(args)
    return int(parsed.run(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cupyattn", description="Attention on any DLPack tensors")
    parser.add_argument("--version", action="version", version=f"cupyattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info.add_parser(commands)
    compiling.add_parser(commands)
    cache.add_parser(commands)
    explain.add_parser(commands)
    replay.add_parser(commands)
    bench.add_parser(commands)
    tune.add_parser(commands)
    commands.add_parser("demo", help="the main job: a prefill and a decode loop, checked and timed")
    return parser
