"""What is measured: every case as data, with its exact work and traffic.

A case is one attention problem, `batch` equal requests of it. Lengths are in tokens. Counts of
pairs, FLOP and bytes are exact functions of the shape: every measured time has a floor beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

OPS = ("prefill", "decode", "host")

_BF16_BYTES = 2
_KV_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Case:
    """One problem.

    `api` is the public function that serves it: "prefill" takes q [q_len, Hq, D], "decode" takes
    q [Hq, D]. `mask` gives the causal mask as a custom mask ("bool" or "packed") in place of the
    flag. `framework` and `out` matter to host cases: whose arrays ours is called with, and whether
    it gets `out=`. `goals` are (peer, factor): ours should take at most 1/factor of its time.
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
    framework: str = "torch"
    out: bool = True
    goals: tuple[tuple[str, float], ...] = ()
    host_goal_us: float | None = None

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
        )

    def visible_keys(self, row: int) -> tuple[int, int]:
        """First and past-the-last key that query row `row` sees (bottom-right aligned)."""
        diagonal = row + self.kv_len - self.q_len
        stop = min(self.kv_len, diagonal + 1) if self.is_causal else self.kv_len
        start = max(0, diagonal - self.window_left) if self.window_left >= 0 else 0
        return start, max(start, stop)

    @property
    def pairs(self) -> int:
        """Visible (query row, key) pairs of one head of one request."""
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
        q_and_o = self.q_len * self.num_qo_heads * width * _BF16_BYTES
        kv = keys * self.num_kv_heads * width * _KV_BYTES[self.kv_dtype]
        cells = self.q_len * self.kv_len
        mask = {"none": 0, "bool": cells, "packed": -(-cells // 8)}[self.mask]
        return self.batch * (q_and_o + kv + mask)

    def floor_us(self, tflops: float, gbps: float) -> float:
        """No kernel is faster than this on a device of these two measured ceilings."""
        return max(self.flops / tflops / 1e6, self.bytes / gbps / 1e3)


_FA2 = "flashinfer_fa2"


def _prefill(name: str, batch: int, length: int, **more: object) -> Case:
    options: dict[str, object] = {"causal": True, "goals": ((_FA2, 1.0),)}
    return Case(name, "prefill", "prefill", length, length, batch, **(options | more))  # type: ignore[arg-type]


def _option(name: str, factor: float, **more: object) -> Case:
    return _prefill(f"4x4k_{name}", 4, 4096, goals=((_FA2, factor),) if factor else (), **more)


def _decode(label: str, kv_len: int) -> tuple[Case, Case]:
    fp8_goals = ((_FA2, 1.3),)
    bf16 = Case(f"kv{label}", "decode", "decode", 1, kv_len, goals=((_FA2, 1.0), ("fa3", 0.95)))
    fp8 = replace(bf16, name=f"kv{label}_fp8", kv_dtype="float8_e4m3fn", goals=fp8_goals)
    return bf16, fp8


def _append(q_len: int, label: str, kv_len: int) -> Case:
    return Case(f"append_q{q_len}_kv{label}", "decode", "prefill", q_len, kv_len, causal=True)


def _host(api: str, framework: str, out: bool) -> Case:
    goal = {"torch": 12.0, "cupy": 10.0}[framework] if out else None
    q_len = 1 if api == "decode" else 128
    name = f"host_{api}_{framework}_{'out' if out else 'alloc'}"
    return Case(
        name, "host", api, q_len, 128, causal=api == "prefill", framework=framework, out=out,
        host_goal_us=goal,
    )  # fmt: skip


_DECODE_LENGTHS = (("4k", 4096), ("32k", 32768), ("128k", 131072))

# Most wanted first: a run that spends its budget loses the end of this list.
CASES: tuple[Case, ...] = (
    _prefill("4x4k", 4, 4096),
    _prefill("1x16k", 1, 16384),
    *(_decode(label, n)[0] for label, n in _DECODE_LENGTHS),
    *(_decode(label, n)[1] for label, n in _DECODE_LENGTHS),
    _option("mask_bits", 4.0, causal=False, mask="packed"),
    _option("alibi", 2.0, pos_encoding_mode="ALIBI"),
    _option("rope", 1.0, pos_encoding_mode="ROPE_LLAMA"),
    _option("softcap", 1.0, logits_soft_cap=30.0),
    _option("window1023", 1.0, window_left=1023),
    _host("decode", "torch", True),
    _host("decode", "cupy", True),
    _host("prefill", "torch", True),
    _host("prefill", "cupy", True),
    _prefill("1x16k_d64", 1, 16384, head_dim_qk=64, head_dim_vo=64, goals=((_FA2, 0.95),)),
    _prefill(
        "4x4k_d256", 4, 4096, num_qo_heads=16, num_kv_heads=4, head_dim_qk=256, head_dim_vo=256,
        goals=((_FA2, 0.95),),
    ),
    _prefill(
        "1x16k_d64_mha", 1, 16384, num_kv_heads=32, head_dim_qk=64, head_dim_vo=64,
        goals=((_FA2, 0.95),),
    ),
    *(_append(q, label, n) for q in (16, 64, 128) for label, n in (("8k", 8192), ("32k", 32768))),
    _prefill("1x16k_full", 1, 16384, causal=False, goals=()),
    _prefill(
        "1x4k_192_128", 1, 4096, num_qo_heads=128, num_kv_heads=128, head_dim_qk=192, goals=()
    ),
    _option("mask_bool", 0.0, causal=False, mask="bool"),
    _host("decode", "torch", False),
    _host("decode", "cupy", False),
    _host("prefill", "torch", False),
    _host("prefill", "cupy", False),
)  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


def select(ops: Sequence[str] = OPS, patterns: Sequence[str] = ("*",)) -> list[Case]:
    """Cases of the given ops whose name matches any of the globs, in the order of CASES."""
    return [
        case
        for case in CASES
        if case.op in ops and any(fnmatchcase(case.name, pattern) for pattern in patterns)
    ]
