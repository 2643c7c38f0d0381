"""One batch of requests as data. Its counts are sums of those of its requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from ..case import Case


@dataclass(frozen=True)
class BatchCase:
    """One batch.

    `api` names the wrapper that serves it: "decode" (paged KV, one query row a request), "paged"
    (prefill over paged KV), "ragged" (prefill over contiguous KV), "cascade" (decode rows whose
    first `shared` keys are the same pages), "mixed" (long chunks beside decodes, paged) or "verify"
    (decode with equally many rows a request; FlashInfer's is "paged"), "mla" (latent
    attention, whose values are the first columns of its keys). `requests` are groups of equal ones,
    (how many, query rows, keys). `mask` "packed" gives the causal mask as bits in place
    of the flag, "tree" lets a query row see all earlier keys and its ancestors in a binary tree of
    the rows. `dtype` is that of q and o, of q alone where it has 8 bits; `sinks` adds a logit of
    each head to the denominator. The check samples rows of `checked` requests (None: of all). The
    report divides the time of this case by that of the one `against` names, which must take at
    least `against_goal` of it.
    `is_portable`: ours runs only in a process with CUPYATTN_PORTABLE=1.
    `pool`: each request's keys are a list of slots drawn from a pool of so many (sparse latent
    attention, pages of 1); 0: each has keys of its own.
    `has_nan`: slots of a pool that no key owns hold NaN, not large numbers. FlashAttention-3 and
    others multiply them by weights of 0, so that an answer would be none.

    For host cases: `timed` is "run" or "plan"; `framework` and `out` say whose arrays ours is
    called with, and whether it gets `out=`; `arrays` says what plan() gets its tables as, "numpy",
    "torch_cpu" or "device" (arrays of the framework on the GPU).
    """

    name: str
    op: str
    api: str
    requests: tuple[tuple[int, int, int], ...]
    page_size: int = 16
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    causal: bool = False
    pos_encoding_mode: str = "NONE"
    logits_soft_cap: float = 0.0
    window_left: int = -1
    mask: str = "none"
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    sinks: bool = False
    checked: int | None = None
    shared: int = 0
    pool: int = 0
    has_nan: bool = True
    is_portable: bool = False
    against: str = ""
    against_goal: float | None = None
    timed: str = "run"
    framework: str = "torch"
    out: bool = True
    arrays: str = "device"
    goals: tuple[tuple[str, float], ...] = ()
    host_goal_us: float | None = None

    @property
    def is_host(self) -> bool:
        """Whether the host's part of a call is timed, and not the device's."""
        return self.op == "host_batch"

    @property
    def is_paged(self) -> bool:
        return self.api != "ragged"

    @property
    def has_mask(self) -> bool:
        """Whether bits of the whole mask say which keys rows see."""
        return self.mask == "packed"

    @property
    def is_8bit(self) -> bool:
        """Whether queries have 8 bits; outputs are bfloat16 then."""
        return self.dtype == "float8_e4m3fn"

    @property
    def is_plain(self) -> bool:
        """No option beyond causality."""
        return self.groups[0].is_plain

    @property
    def batch(self) -> int:
        return sum(count for count, _, _ in self.requests)

    @property
    def q_lens(self) -> list[int]:
        return [q_len for count, q_len, _ in self.requests for _ in range(count)]

    @property
    def kv_lens(self) -> list[int]:
        return [kv_len for count, _, kv_len in self.requests for _ in range(count)]

    @property
    def seen(self) -> list[int]:
        """Keys that each token sees: tokens are the last of their requests."""
        return [
            kv_len - q_len + 1 + row
            for count, q_len, kv_len in self.requests
            for _ in range(count)
            for row in range(q_len)
        ]

    @property
    def q_offsets(self) -> list[int]:
        """First query row of each request, and their number."""
        return [0, *accumulate(self.q_lens)]

    @property
    def kv_offsets(self) -> list[int]:
        """First key of each request where keys are ragged, and their number."""
        return [0, *accumulate(self.kv_lens)]

    @property
    def groups(self) -> list[Case]:
        """Each group of equal requests as a case of its own."""
        return [self._group(*group) for group in self.requests]

    def request(self, b: int) -> Case:
        """Request `b` alone."""
        return self._group(1, self.q_lens[b], self.kv_lens[b])

    def _group(self, count: int, q_len: int, kv_len: int) -> Case:
        return Case(
            self.name,
            self.op,
            "decode" if self.api in ("decode", "cascade") else "prefill",
            q_len,
            kv_len,
            count,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.head_dim_vo,
            self.causal,
            self.pos_encoding_mode,
            self.logits_soft_cap,
            self.window_left,
            self.mask,
            self.kv_dtype,
            self.sinks,
            dtype=self.dtype,
        )

    @property
    def pairs(self) -> int:
        """Visible (query row, key) pairs of one head, all requests."""
        return sum(group.batch * group.pairs for group in self.groups)

    @property
    def flops(self) -> int:
        """Exact FLOP of the two matrix products over visible pairs, all heads and requests."""
        return sum(group.flops for group in self.groups)

    @property
    def quoted_flops(self) -> int:
        """FLOP in FlashAttention's convention, request by request."""
        return sum(group.quoted_flops for group in self.groups)

    @property
    def bytes(self) -> int:
        """Least device traffic: q, o, masks, each visible key and value once; no tables. Of
        lists: as many distinct slots as are to be expected."""
        one = self.request(0)
        shared_values = 0
        if self.api == "mla":  # a value is part of its key
            of_values = self.num_kv_heads * self.head_dim_vo * one.kv_itemsize
            shared_values = sum(self.kv_lens) * of_values
        row = self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * one.kv_itemsize
        both = sum(group.bytes for group in self.groups) - shared_values
        if self.pool:
            unlisted = math.prod(1 - listed / self.pool for listed in self.kv_lens)
            repeated = sum(self.kv_lens) - round(self.pool * (1 - unlisted))
            return both - repeated * self.num_kv_heads * self.head_dim_qk * one.kv_itemsize
        return both - (self.batch - 1) * self.shared * row

    def floor_us(self, tflops: float, gbps: float) -> float:
        """No kernel is faster than this on a device of these two measured ceilings."""
        return max(self.flops / tflops / 1e6, self.bytes / gbps / 1e3)
