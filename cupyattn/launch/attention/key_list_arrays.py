"""What launches of attention by lists are told of a call."""

from __future__ import annotations

from typing import NamedTuple


class Lists(NamedTuple):
    """What launches are told of lists, besides addresses.

    length, granularity  entries of a list, and keys of the block that one names (a power of two)
    stride_n, stride_group  from a token's list to the next one's, and from a head's or group's
    window          so many last keys that a token sees come besides those of its list
    num_requests    of all tokens
    request_tokens  of each request; 0: offsets say it
    kv_step         from a request's pages in the table to the next one's, or from its first row
    max_kv_len      keys a request has room for
    is_causal       tokens see no key behind their own: they are the last of their requests
    kv_lens_are_steps  lengths are the steps of offsets
    num_pages       of the cache, or rows of keys that are in no pages; 0: nobody knows
    steps           words of 32 bits from one to the next of kv_lens, qo_offsets and kv_offsets,
                    whose low words are read where they have 64 bits
    k_scale_step, v_scale_step  from a KV head's scale to the next one's; 0: all share one
    k_scale_request_step, v_scale_request_step  from a request's scales to the next one's
    """

    length: int
    granularity: int
    stride_n: int
    stride_group: int
    num_requests: int
    max_kv_len: int
    window: int = 0
    request_tokens: int = 1
    kv_step: int = 0
    is_causal: bool = True
    kv_lens_are_steps: bool = False
    num_pages: int = 0
    steps: tuple[int, int, int] = (1, 1, 1)
    k_scale_step: int = 1
    v_scale_step: int = 1
    k_scale_request_step: int = 0
    v_scale_request_step: int = 0

    @property
    def num_keys(self) -> int:
        """The keys that a token attends to at most."""
        return self.length * self.granularity + self.window


class ListAddresses(NamedTuple):
    """Where the arrays of a call lie; 0 for what there is not.

    table       int32, pages of the requests; 0: keys lie in rows
    entries     int32 [tokens, groups, length]
    kv_lens     int32 [num_requests], or offsets [num_requests + 1]
    qo_offsets  int32 [num_requests + 1]
    kv_offsets  int32 [num_requests], in place of steps
    key_scales, value_scales  float32, see Lists; those of keys are among params.OPTIONAL too
    """

    q: int
    k: int
    v: int
    o: int
    entries: int
    kv_lens: int
    table: int = 0
    qo_offsets: int = 0
    kv_offsets: int = 0
    key_scales: int = 0
    value_scales: int = 0
