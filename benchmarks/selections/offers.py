"""What each implementation offers for a selection."""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ..candidate import Candidate, Unsupported
from .case import SelectionCase
from .inputs import SelectionInputs, scores_of

FOLDER_VARIABLE = "CUPYATTN_BENCH_DEEPGEMM"
OFFERING = ("ours", "deepgemm")
_ROOM, _PAGES = 256, 4  # columns and pages that DeepGEMM's kernels take at a time


def candidates(name: str, case: SelectionCase, inputs: SelectionInputs) -> list[Candidate]:
    """One candidate; Unsupported with the reason if it cannot serve the case."""
    return [_ours(case, inputs) if name == "ours" else _deepgemm(case, inputs)]


def _ours(case: SelectionCase, inputs: SelectionInputs) -> Candidate:
    import torch

    if case.page_size:
        arrays = inputs.q, inputs.cache, inputs.table, inputs.lengths
        more: dict[str, Any] = {}
    else:
        arrays = inputs.q, inputs.k, None, None
        more = {"indptr": inputs.offsets, "kv_indptr": inputs.key_offsets}
        more |= {"k_scales": inputs.k_scales}
    out = torch.empty(
        (case.q_offsets[-1], 1, case.entries), dtype=torch.int32, device=inputs.q.device
    )
    call = functools.partial(
        import_module("cupyattn").sparse.select,
        *arrays,
        topk=case.entries,
        block=1,
        score="relu_sum",
        weights=inputs.weights,
        out=out,
        **more,
    )
    return Candidate("ours", "select", call, lambda lists: scores_of(case, inputs, lists))


def _deepgemm(case: SelectionCase, inputs: SelectionInputs) -> Candidate:
    """Its kernels of scores for sm_90, and torch.topk: a module deepgemm.py in a folder that
    CUPYATTN_BENCH_DEEPGEMM names, which is not in this repository. It has

    paged(q [requests, drafts, heads, 128], cache, weights, lengths, table, keys, logits) and
    flat(q, k, k_scales, weights, first keys, last keys + 1, logits): a call, its schedule made
    beforehand.
    """
    import torch

    module, device, tokens = _module(), inputs.q.device, case.q_offsets[-1]
    keys = case.kv_lens[0]
    shape = (_up(tokens, 4), _up(keys + _ROOM, _ROOM))
    logits = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
    if case.page_size:
        q = inputs.q.view(case.batch, -1, *inputs.q.shape[1:])
        width = inputs.table.shape[1]
        table = torch.nn.functional.pad(inputs.table, (0, _up(width, _PAGES) - width))
        arrays = q, inputs.cache, inputs.weights, inputs.lengths, table, keys
        score = module.paged(*arrays, logits)
    else:
        ends = torch.tensor(case.seen, dtype=torch.int32, device=device)
        scales = torch.nn.functional.pad(inputs.k_scales, (0, _up(keys, 4) - keys))
        arrays = inputs.q, inputs.k, scales, inputs.weights, torch.zeros_like(ends), ends
        score = module.flat(*arrays, logits)
    columns = logits[:tokens, :keys]

    def call() -> Any:
        score()
        return torch.topk(columns, min(case.entries, keys), dim=1)

    return Candidate("deepgemm", "topk", call, functools.partial(_read, case, inputs))


def _read(case: SelectionCase, inputs: SelectionInputs, answer: Any) -> Any:
    """The scores that its columns come to. Its kernel scores the last key for all drafts: a choice
    that knew lengths would leave it out at no cost, so that it stands for the next column here."""
    import torch

    lists = answer.indices.clone()
    for place, token in enumerate(inputs.sampled):
        unseen = lists[token] >= case.seen[token]
        if bool(unseen.any()) and len(lists[token]) < case.seen[token]:
            order = inputs.scores[place].argsort(descending=True)
            rest = order[~torch.isin(order, lists[token])]
            lists[token][unseen] = rest[: int(unseen.sum())]
    return scores_of(case, inputs, lists[:, None])


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _module() -> Any:
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder or not (Path(folder) / "deepgemm.py").exists():
        raise Unsupported(f"{FOLDER_VARIABLE} does not name a folder with deepgemm.py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module("deepgemm")
