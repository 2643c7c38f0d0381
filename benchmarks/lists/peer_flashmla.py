"""FlashMLA over lists: its prompt kernel over 16-bit rows, its decode kernel over rows of 656
bytes, whose schedule is made beforehand."""

from __future__ import annotations

import functools

from ..candidate import Candidate, Unsupported
from ..peers.flashmla import library
from .case import ListCase
from .inputs import ListInputs

NAME = "flashmla"


def candidates(case: ListCase, inputs: ListInputs) -> list[Candidate]:
    """One candidate. It pads heads to 64 nowhere, and refuses fewer by itself."""
    import torch

    if case.second:
        raise Unsupported("this build takes one list over rows of 656 bytes")
    ops, scale = library(), case.head_dim_qk**-0.5
    if not case.row_bytes:
        rows = inputs.pages.view(-1, 1, case.head_dim_qk)
        arguments = inputs.q, rows, inputs.slots[:, None], scale, case.head_dim_vo
        call = functools.partial(ops.sparse_prefill_fwd, *arguments)
        return [Candidate(NAME, "sparse_fwd", call, lambda answer: answer[0][None])]
    q = inputs.q[:, None]
    lengths = inputs.lengths.repeat_interleave(case.q_lens[0])
    schedule = ops.get_mla_decoding_metadata(
        lengths, case.num_qo_heads, 1, case.num_qo_heads, True, case.entries
    )
    table = torch.zeros((len(q), 1), dtype=torch.int32, device=q.device)
    cache = inputs.packed.view(torch.float8_e4m3fn)
    lists = inputs.slots[:, None]
    arguments = q, cache, case.head_dim_vo, lengths, table, scale, False, *schedule, True, lists
    call = functools.partial(ops.fwd_kvcache_mla, *arguments)
    return [Candidate(NAME, "sparse", call, lambda answer: answer[0][:, 0][None])]
