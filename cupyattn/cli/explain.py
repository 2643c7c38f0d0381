"""`cupyattn explain`: which kernels a batch of a model gets, and why."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..choose.card import Card, shipped
from ..core import dtypes
from ..core.device import NO_GPU, DeviceProps, device_props, imagine
from ..core.parse import require_int
from ..core.problem import MAX_LENGTH
from ..core.selection import SCORES, SelectProblem
from ..core.spec import AttentionSpec
from ..engine.key_lists import require_granularity
from ..errors import ArgumentError, CupyAttnError, DeviceError, UnsupportedError
from ..explanation import Explanation, explain_schedule
from ..explanation.of_lists import ListCalls, explain_lists, explain_selection
from ..launch.attention.batch import BatchLauncher
from ..schedule.batch import BatchRequests
from . import model

_AUTO, _WITHOUT_GPU = "auto", "h100"
_PAIR = re.compile(r"(\d+)x(\d+)")
_KIND = re.compile(r"(?:(\d+)x)?(\d+):(\d+)")
_MAX_REQUESTS = 1 << 16
# The L2 of the cards without a GPU. Plans look at it only for the order of heads.
_L2_BYTES = 50 << 20
_LENGTHS = "64x1:4096,2x512:2048"


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "explain",
        help="which kernels a batch gets, and why; needs no GPU",
        description="Plan a batch of a model as cupyattn would and say why its kernels run: what "
        "could serve it, with estimated times, what is refused and why, and the launches. Nothing "
        "is compiled or launched, and no GPU is needed.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="CONFIG",
        help="a Hugging Face config.json; latent attention is planned in its absorbed form",
    )
    parser.add_argument(
        "--batch",
        required=True,
        metavar="LENGTHS",
        help="requests as COUNTxROWS:KEYS with commas, query tokens and all keys of each: "
        f"{_LENGTHS} is 64 decodes and two chunks; without COUNT one",
    )
    parser.add_argument(
        "--page-size", type=int, default=16, help="tokens of a page; 0: ragged keys (default: 16)"
    )
    parser.add_argument("--dtype", help="of queries (default: the model's)")
    parser.add_argument("--kv-dtype", help="of keys, such as float8_e4m3fn (default: of queries)")
    parser.add_argument(
        "--no-causal", action="store_true", help="rows see all keys, as in an encoder"
    )
    parser.add_argument("--window", type=int, default=-1, help="keys to the left that a row sees")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share the heads"
    )
    _add_lists(parser)
    names = [card.name.lower() for card in shipped()]
    parser.add_argument(
        "--card",
        choices=(_AUTO, *names),
        default=_AUTO,
        help="which card to plan for (default: the first GPU here, or an H100 without one)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="SVG", help="also write a picture of the SMs over time"
    )
    parser.set_defaults(run=run)


def _add_lists(parser: argparse.ArgumentParser) -> None:
    """Add the options of tokens that attend to lists."""
    parser.add_argument(
        "--lists",
        metavar="ENTRIESxKEYS",
        help="each token attends to a list of so many blocks of so many keys (sparse.attend), such "
        "as 16x128",
    )
    parser.add_argument(
        "--list-window", type=int, default=0, help="last keys that come besides those of a list"
    )
    parser.add_argument(
        "--shared-lists", action="store_true", help="all key heads share a token's list"
    )
    parser.add_argument(
        "--select",
        metavar="HEADSxDIM",
        help="and its list is made by sparse.select from so many index heads of so many columns, "
        "such as 4x128",
    )
    parser.add_argument(
        "--score",
        choices=SCORES,
        default=SCORES[0],
        help=f"by which --select chooses (default: {SCORES[0]})",
    )


def run(args: argparse.Namespace) -> int:
    """Print it; 2 if there is nothing to explain."""
    try:
        result = explanation(args)
        print(result)
        if args.plot is not None:
            _write(args.plot, result.picture())
    except CupyAttnError as error:
        print(f"cupyattn explain: {error}", file=sys.stderr)
        return 2
    return 0


def explanation(args: argparse.Namespace) -> Explanation:
    """What the parsed options ask for. Raises ArgumentError or UnsupportedError."""
    spec = _spec(args)
    requests = _requests(args.batch, spec)
    problem = spec.problem()
    problem.check_supported()
    device_index = imagine(_props(args.card))
    if args.lists is not None:
        return _of_lists(args, spec, requests, device_index)
    if args.select is not None:
        raise ArgumentError("--select: given without --lists, which says what is selected")
    launcher = BatchLauncher(spec, problem, device_index)
    launcher = launcher.serving(requests)
    return explain_schedule(launcher, launcher.schedule(requests), requests)


def _of_lists(
    args: argparse.Namespace, spec: AttentionSpec, requests: BatchRequests, device_index: int
) -> Explanation:
    """What `sparse.attend` launches for lists, and `sparse.select` for them."""
    if spec.latent:
        raise UnsupportedError("--lists: are explained of keys and values; wanted another --model")
    if not spec.page_size:
        raise ArgumentError("--page-size: got 0 with --lists; wanted the tokens of a page")
    if spec.window_left >= 0:
        raise ArgumentError("--window: given with --lists; wanted --list-window")
    entries, keys = _pair(args.lists, "--lists", "16x128")
    window = require_int(args.list_window, "--list-window", 0)
    calls = ListCalls(entries, require_granularity(keys, "--lists"), window, not args.shared_lists)
    result = explain_lists(spec, calls, requests, device_index)
    if args.select is None:
        return result
    heads, dim = _pair(args.select, "--select", "4x128")
    groups = spec.num_kv_heads if calls.has_own_lists else 1
    if heads % groups:
        raise ArgumentError(
            f"--select: got {heads} index heads for lists of {groups} key heads; wanted a multiple"
        )
    problem = SelectProblem(
        dtype_q=spec.dtype_q,
        dtype_k=spec.dtype_kv,
        head_dim=dim,
        num_heads=heads,
        num_groups=groups,
        score=args.score,
        block=keys,
        topk=entries,
    )
    return replace(
        result, parts=(explain_selection(problem, requests, spec.page_size, device_index),)
    )


def _pair(text: str, name: str, example: str) -> tuple[int, int]:
    result = _PAIR.fullmatch(text.replace(" ", ""))
    first, second = (int(x) for x in result.groups()) if result else (0, 0)
    if not first or not second or max(first, second) > MAX_LENGTH:
        raise ArgumentError(f"{name}: got {text!r}; wanted two numbers, such as {example}")
    return first, second


def _spec(args: argparse.Namespace) -> AttentionSpec:
    """What a layer of the model asks for on one GPU."""
    dtype = None if args.dtype is None else dtypes.parse(args.dtype, "--dtype")
    spec = model.attention(args.model, dtype)
    dtype_kv = spec.dtype_kv if args.kv_dtype is None else dtypes.parse(args.kv_dtype, "--kv-dtype")
    shares = require_int(args.tensor_parallel, "--tensor-parallel", 1)
    if spec.num_qo_heads % shares or (spec.num_kv_heads % shares and shares % spec.num_kv_heads):
        raise ArgumentError(
            f"--tensor-parallel: got {shares}; wanted a number that divides {spec.num_qo_heads} "
            f"query heads, and divides {spec.num_kv_heads} key heads or is a multiple of them"
        )
    return replace(
        spec,
        num_qo_heads=spec.num_qo_heads // shares,
        num_kv_heads=max(1, spec.num_kv_heads // shares),
        dtype_kv=dtype_kv,
        page_size=require_int(args.page_size, "--page-size", 0),
        causal=not args.no_causal,
        window_left=require_int(args.window, "--window", -1),
    )


def _requests(text: str, spec: AttentionSpec) -> BatchRequests:
    """The requests of --batch, one behind another."""
    lengths: list[tuple[int, int]] = []
    for part in text.replace(" ", "").split(","):
        result = _KIND.fullmatch(part)
        number, rows, keys = (int(x or 1) for x in result.groups()) if result else (0, 0, 0)
        if not result or not rows or max(rows, keys) > MAX_LENGTH:
            raise ArgumentError(
                f"--batch: got {part!r}; wanted COUNTxROWS:KEYS, such as {_LENGTHS}, of lengths up "
                f"to {MAX_LENGTH}"
            )
        if keys < rows and spec.causal:
            raise ArgumentError(
                f"--batch: got {part!r}, with {rows} query tokens and {keys} keys; wanted all keys "
                "of a request, those of its query tokens among them"
            )
        if len(lengths) + number > _MAX_REQUESTS:
            raise ArgumentError(f"--batch: more than {_MAX_REQUESTS} requests; name fewer")
        lengths += [(rows, keys)] * number
    if not lengths:
        raise ArgumentError(f"--batch: got {text!r}, no requests; wanted some, such as {_LENGTHS}")
    qo_len, kv_len = np.array(lengths, np.int64).T.copy()
    sizes = kv_len if not spec.page_size else -(-kv_len // spec.page_size)
    q_start, kv_start = np.cumsum(qo_len) - qo_len, np.cumsum(sizes) - sizes
    uniform = int(qo_len[0]) if (qo_len == qo_len[0]).all() else -1
    return BatchRequests(qo_len, kv_len, q_start, kv_start, uniform=uniform)


def _props(name: str) -> DeviceProps:
    """The card that is asked for."""
    if name == _AUTO:
        try:
            return device_props(0)
        except CupyAttnError as error:
            if not isinstance(error, DeviceError | ArgumentError):
                raise
            name = _WITHOUT_GPU
    return _props_of(next(card for card in shipped() if card.name.lower() == name))


def _props_of(card: Card) -> DeviceProps:
    return DeviceProps(
        index=NO_GPU.index,
        name=card.match[0] if card.match else card.name,
        arch=card.arch,
        num_sms=card.num_sms,
        max_smem_per_block=0,
        smem_per_sm=0,
        l2_bytes=_L2_BYTES,
        memory_rate=card.memory_rate,
        sm_clock=card.sm_clock,
    )


def _write(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, "utf-8")
    except OSError as error:
        raise ArgumentError(f"--plot: {path} cannot be written ({error.strerror})") from None
    print(f"\npicture: {path}")
