"""The arrays of a call, with a plan and without one, by their roles."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.records import maker


class Arrays(NamedTuple):
    """The arrays of a call without a plan as given; None where there is none. Those that most calls
    have come first: an argument is found by its name in the order of the fields.

    q, k, v      queries and keys; of one tensor for keys and values v is None. Without block_tables
                 k and v are rows of all requests, else pages. Of latent attention q and k are rows
                 of both parts, or of the latent part beside q_rope and k_rope, and there is no v
    block_tables pages of each request [B, max_pages], or slots of keys [..., most keys] in a list
    kv_lens, qo_lens, qo_offsets, kv_offsets  see plan_batch.Lengths; offsets without lengths are
                 cumulative, as kv_lens are with `cumulative_kv_lens`. kv_lens None for a list: all
    o_offsets, v_offsets  must say the same as those of q and k, which are read in their place
    scale_q, scale_k, scale_v  one number each in memory: the first two multiply the logits, the
                 last the output
    mask         over the query tokens of requests that have equally many (row_mask.py)
    kv_begin     the first key of each request, of those that kv_lens counts; where ranks share the
                 keys, whole lengths, of which kv_lens are this rank's
    alibi_slopes  float32 [num_qo_heads] or [B, num_qo_heads]: minus the slope times the distance of
                 query and key is added to the logits, behind the soft cap
    max_logits   float32 [rows, heads] of lists, -inf, to be raised to the largest natural logits
    output_gate  like q, without its last axis or with that of v: the output is multiplied by the
                 sigmoid
    lists        int32 [rows of q, groups, entries]: blocks of keys of its request that a token sees
                 (key_lists.py)
    Slopes and scales [B, heads] are of the caller's requests, see `sharers` of Options
    """

    q: Any
    k: Any
    v: Any = None
    workspace: Any = None
    block_tables: Any = None
    kv_lens: Any = None
    out: Any = None
    lse: Any = None
    qo_offsets: Any = None
    kv_offsets: Any = None
    sinks: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None
    alibi_slopes: Any = None
    mask: Any = None
    kv_begin: Any = None
    qo_lens: Any = None
    q_rope: Any = None
    k_rope: Any = None
    max_logits: Any = None
    output_gate: Any = None
    o_offsets: Any = None
    v_offsets: Any = None
    lists: Any = None


class MoreArrays(NamedTuple):
    """What few calls have besides.

    qv           like q: queries that are multiplied with values too
    are_causal   [B], 0 for requests that see all their keys in a causal call
    new_k, new_v, new_offsets  rows that are written to k and v first, behind kv_lens, and where
                 those of each request begin
    rotary_cos, rotary_sin, rotary_begin  what they and q are rotated by, and from where on
    cache_rows   the row of k and v, or of block_tables, that each request has
    """

    qv: Any = None
    are_causal: Any = None
    new_k: Any = None
    new_v: Any = None
    new_offsets: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_begin: Any = None
    cache_rows: Any = None


NO_MORE = MoreArrays()
ROLES = Arrays._fields + MoreArrays._fields

make_arrays = maker(Arrays)


class RunArrays(NamedTuple):
    """The arrays of a run of a plan as given; None where there is none.

    k, v   rows of all requests, or pages. Of pages `k` may be the whole cache, one tensor for keys
           and values or a pair of them
    mask   over the query tokens of requests that have equally many (row_mask.py)
    q_rope, k_rope   of latent attention, where q and k hold the latent parts alone
    output_gate      its sigmoid multiplies the output, of each head or element
    """

    q: Any
    k: Any
    v: Any = None
    out: Any = None
    lse: Any = None
    sinks: Any = None
    mask: Any = None
    q_rope: Any = None
    k_rope: Any = None
    output_gate: Any = None
