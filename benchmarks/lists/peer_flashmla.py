"""FlashMLA over lists: its prompt kernel over 16-bit rows, its decode kernel over rows of 656
bytes, whose schedule is made beforehand."""

from __future__ import annotations

import functools

from ..candidate import Candidate, Unsupported
from ..peers.flashmla import library
from .case import ListCase
from .inputs import ListInputs

NAME = "flashmla"


_LEAST_HEADS = 64


def candidates(case: ListCase, inputs: ListInputs) -> list[Candidate]:
    """One candidate. Fewer than 64 heads are padded beforehand, as engines do."""
    import torch

    if case.second:
        raise Unsupported("this build takes one list over rows of 656 bytes")
    ops, scale, heads = library(), case.head_dim_qk**-0.5, case.num_qo_heads
    q, lists = inputs.q, inputs.slots[:, None]
    if heads < _LEAST_HEADS:
        q = torch.nn.functional.pad(q, (0, 0, 0, _LEAST_HEADS - heads))
    if not case.row_bytes:
        rows = inputs.pages.view(-1, 1, case.head_dim_qk)
        call = functools.partial(ops.sparse_prefill_fwd, q, rows, lists, scale, case.head_dim_vo)
        return [Candidate(NAME, "sparse_fwd", call, lambda answer: answer[0][None, :, :heads])]
    lengths = inputs.lengths.repeat_interleave(case.q_lens[0])
    schedule = ops.get_mla_decoding_metadata(lengths, q.shape[1], 1, q.shape[1], True, case.entries)
    table = torch.zeros((len(q), 1), dtype=torch.int32, device=q.device)
    cache = inputs.packed.view(torch.float8_e4m3fn)
    rest = case.head_dim_vo, lengths, table, scale, False, *schedule, True, lists
    call = functools.partial(ops.fwd_kvcache_mla, q[:, None], cache, *rest)
    return [Candidate(NAME, "sparse", call, lambda answer: answer[0][None, :, 0, :heads])]
