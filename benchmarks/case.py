"""One attention problem as data, with its exact work and traffic.

`batch` equal requests of it. Lengths are in tokens. Counts of pairs, FLOP and bytes are exact
functions of the shape: every measured time has a floor beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

_BF16_BYTES = 2  # of outputs
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Case:
    """One problem.

    `api` is the public function that serves it: "prefill" takes q [q_len, Hq, D], "decode" takes
    q [Hq, D]. `mask` gives the causal mask as a custom mask ("bool" or "packed") in place of the
    flag. `sinks` adds a logit of each head to the denominator. `dtype` is that of q; outputs are of
    16 bits. `framework` and `out` matter
    to host cases: whose arrays ours is called with, and whether it gets `out=`. `goals` are (peer
    or peer:variant, factor): ours should take at most 1/factor of its time; "best" is the fastest
    peer.
    """

    name: str
    op: str
    api: str
    q_len: int
    kv_len: int
    batch: int = 1
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
    sinks: bool = False
    framework: str = "torch"
    out: bool = True
    goals: tuple[tuple[str, float], ...] = ()
    host_goal_us: float | None = None
    dtype: str = "bfloat16"

    @property
    def is_host(self) -> bool:
        """Whether the host's part of a call is timed, and not the device's."""
        return self.op == "host"

    @property
    def is_causal(self) -> bool:
        """Whether rows see no later keys, by the flag or by the custom mask."""
        return self.causal or self.mask != "none"

    @property
    def is_plain(self) -> bool:
        """No option beyond causality."""
        return (
            self.pos_encoding_mode == "NONE"
            and self.logits_soft_cap == 0.0
            and self.window_left < 0
            and self.mask == "none"
            and not self.sinks
        )

    @property
    def kv_itemsize(self) -> int:
        return _ITEM_BYTES[self.kv_dtype]

    def visible_keys(self, row: int) -> tuple[int, int]:
        """First and past-the-last key that query row `row` sees (bottom-right aligned)."""
        diagonal = row + self.kv_len - self.q_len
        stop = min(self.kv_len, diagonal + 1) if self.is_causal else self.kv_len
        start = max(0, diagonal - self.window_left) if self.window_left >= 0 else 0
        return start, max(start, stop)

    @property
    def pairs(self) -> int:
        """Visible (query row, key) pairs of one head of one request; of a tree as of a chain."""
        return sum(stop - start for start, stop in map(self.visible_keys, range(self.q_len)))

    @property
    def flops(self) -> int:
        """Exact FLOP of the two matrix products over visible pairs, all heads and requests."""
        work = 2 * (self.head_dim_qk + self.head_dim_vo)
        return work * self.pairs * self.num_qo_heads * self.batch

    @property
    def quoted_flops(self) -> int:
        """FLOP in FlashAttention's convention, which TFLOP/s are quoted in.

        4·S²·D·H·B, halved for causal; append and windows are quoted by their exact pairs.
        """
        if self.q_len != self.kv_len or self.window_left >= 0:
            return self.flops
        square = self.q_len * self.kv_len // (2 if self.is_causal else 1)
        work = 2 * (self.head_dim_qk + self.head_dim_vo)
        return work * square * self.num_qo_heads * self.batch

    @property
    def bytes(self) -> int:
        """Least device traffic: q, o, the mask and each key and value that any row sees, once."""
        first_key = self.visible_keys(0)[0] if self.q_len else self.kv_len
        keys = self.kv_len - first_key
        width = self.head_dim_qk + self.head_dim_vo
        q_row = self.head_dim_qk * _ITEM_BYTES[self.dtype]
        q_and_o = self.q_len * self.num_qo_heads * (q_row + self.head_dim_vo * _BF16_BYTES)
        kv = keys * self.num_kv_heads * width * self.kv_itemsize
        cells = self.q_len * self.kv_len
        mask = {"none": 0, "bool": cells, "packed": -(-cells // 8), "tree": 4 * self.q_len}
        return self.batch * (q_and_o + kv + mask[self.mask])

    def floor_us(self, tflops: float, gbps: float) -> float:
        """No kernel is faster than this on a device of these two measured ceilings."""
        return max(self.flops / tflops / 1e6, self.bytes / gbps / 1e3)
