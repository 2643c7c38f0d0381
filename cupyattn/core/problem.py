"""Frozen descriptors of what is asked: everything about a call that a kernel is compiled for.

No tiles, no devices, no lengths: those belong to the schedule and the launch layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import ArgumentError, UnsupportedError
from . import dtypes
from .dtypes import DType
from .logits import LogitsExpression

KV_LAYOUTS = ("NHD", "HND")
POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
# Forms of a custom mask, in the order of kernels/cupyattn/shared/mask.cuh.
MASK_FORMS = ("whole", "rows", "runs", "expression")
MAX_HEAD_DIM = 256
# Head dims of q and k, and of v, beyond that; and latent and rope columns of latent attention.
# One warp cannot hold the output of such heads, so the wide kernels serve them.
WIDE_HEAD_DIMS = tuple(
    (qk, vo) for vo in (512, 256) for qk in range(64, 577, 64) if max(qk, vo) > MAX_HEAD_DIM
)
# Scales of latent keys of fp8: one for all, one for each token, four in rows of 656 bytes, whose
# rope columns are bfloat16, or seven behind the rows of a page of 584 bytes a token
# (reference/latent_rows.py); as in sm90/wide/traits.cuh.
KEY_SCALES = ("", "tokens", "rows", "pages")
LATENT_HEAD_DIMS = (512, 64), (512, 0), (256, 64), (256, 0)
# Lengths are 32-bit in the kernels, which read indices up to a tile beyond the end.
MAX_LENGTH = 2**31 - 1 - 64


class OutputGate(NamedTuple):
    """Gates whose sigmoids multiply the output: their dtype, and whether each element of a row has
    one, or each head."""

    dtype: DType
    of_elements: bool


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The compile-time facts of one attention call.

    Head dims are per head and in elements. `dtype_kv` is that of values, and of keys unless these
    are int8, as int8 queries want them (`dtype_k`). `aligned` says that every row of q, k, v and o,
    and of gates of elements, starts on a 16-byte boundary; `prescale_logits` that the logit scale
    is not one positive number for all heads, so that it cannot be folded into the softmax; `paged`
    that keys are found through a page table, `own_value_pages` that values are found through
    another; `mask_form` what a custom mask holds: bits of all keys, of a request's last keys, runs,
    or an expression of `logits`, which are the caller's own; `latent` that a value is the first
    head_dim_vo columns of its key, `sparse` that a list names each key, `key_scales` which scales
    latent keys have (KEY_SCALES), `output_gate` what multiplies the output; `key_share` that rows
    see keys by their places in a sequence that ranks share (key_share.py), `int8_keys` that keys
    are int8 though queries are not: these were widened from int8; `block_scales` that blocks of
    tokens of q, k and v have scales; `skips_tiles` that tiles which weigh next to nothing may be
    left out; `dtype_rows` what rows of q are in memory if kernels widen them on the way, else None.
    Causality, windows, sinks, scales and LSE are run-time facts: they cost nothing when off, so
    they do not multiply the number of kernels.
    """

    dtype_q: DType
    dtype_kv: DType
    dtype_o: DType
    head_dim_qk: int
    head_dim_vo: int
    pos_encoding: str = "NONE"
    soft_cap: bool = False
    custom_mask: bool = False
    mask_form: str = "whole"
    prescale_logits: bool = False
    aligned: bool = True
    paged: bool = False
    own_value_pages: bool = False
    latent: bool = False
    sparse: bool = False
    key_scales: str = ""
    logits: LogitsExpression | None = None
    output_gate: OutputGate | None = None
    key_share: bool = False
    int8_keys: bool = False
    block_scales: bool = False
    skips_tiles: bool = False
    dtype_rows: DType | None = None

    @property
    def dtype_k(self) -> DType:
        """The dtype of keys: int8 beside int8 queries, else that of values."""
        return dtypes.int8 if self.int8_keys else self.dtype_q.of_keys or self.dtype_kv

    @property
    def is_8bit(self) -> bool:
        """Whether queries, keys and values are multiplied as they are, in 8 bits (native fp8)."""
        return self.dtype_q.is_8bit_query

    @property
    def has_tiles_of_prompts(self) -> bool:
        """Whether tiles of prompts serve requests of any number of rows: no others are made."""
        return self.is_8bit or self.block_scales

    def widened(self) -> AttentionProblem:
        """The problem of queries of 8 bits in float16, which holds them, over the same keys."""
        is_int8 = self.dtype_q is dtypes.int8
        return replace(self, dtype_q=dtypes.float16, int8_keys=is_int8)

    @property
    def is_wide(self) -> bool:
        """Whether the kernels of wide heads serve it: one warp cannot hold its output."""
        return self.latent or max(self.head_dim_qk, self.head_dim_vo) > MAX_HEAD_DIM

    @property
    def transforms_logits(self) -> bool:
        """Whether an expression of the caller's takes the place of each logit."""
        return self.logits is not None and self.logits.transform is not None

    @property
    def adds_near_biases(self) -> bool:
        """Whether all that the expression does is to add biases of near keys, rel_logits."""
        return self.logits is not None and self.logits.is_relative

    @property
    def biases_logits(self) -> bool:
        """Whether a logit takes facts of its place: ALiBi, or an expression."""
        return self.pos_encoding == "ALIBI" or self.transforms_logits

    @property
    def has_long_transform(self) -> bool:
        """Whether an expression takes registers that a tile of the usual size does not leave."""
        return self.logits is not None and self.logits.is_long

    @property
    def has_large_mask(self) -> bool:
        """Whether an expression takes registers from the warps that write mask bits."""
        return self.logits is not None and self.logits.has_large_mask

    @property
    def reads_rows(self) -> bool:
        """Whether a logit takes facts of its row: a scale, a slope, or what an expression reads."""
        return self.prescale_logits or self.biases_logits

    def check_dtypes(self) -> None:
        """Raise UnsupportedError or ArgumentError unless the dtypes make sense on any device."""
        if self.is_8bit:
            # check_supported refuses such queries of latent keys, so these are not named.
            if self.dtype_kv is not dtypes.float8_e4m3fn and not self.latent:
                raise ArgumentError(
                    f"k, v: dtype {self.dtype_kv} with q of dtype {self.dtype_q}; wanted k of "
                    f"{self.dtype_k} and v of float8_e4m3fn, or q in float16 or bfloat16"
                )
        elif not (self.dtype_q.is_float16 or self.dtype_q is dtypes.float32):
            error = UnsupportedError if self.dtype_q.is_fp8 else ArgumentError
            raise error(
                f"q: dtype {self.dtype_q} is not supported; cast q to float16 or bfloat16, or "
                "quantize it to float8_e4m3fn or int8"
            )
        elif self.dtype_kv is not self.dtype_q and not self.dtype_kv.is_fp8:
            raise ArgumentError(
                f"k, v: dtype {self.dtype_kv} with q of dtype {self.dtype_q}; wanted the dtype of "
                "q, float8_e4m3fn or float8_e5m2"
            )
        is_half_or_fp8 = self.dtype_o.is_float16 or self.dtype_o.is_fp8
        if not (is_half_or_fp8 or self.dtype_o is dtypes.float32):
            raise ArgumentError(
                f"o_dtype: {self.dtype_o} is not a supported output; use float16, bfloat16, "
                "float32, float8_e4m3fn or float8_e5m2"
            )

    def check_supported(self, on_cpu: bool = False) -> None:
        """Raise UnsupportedError or ArgumentError unless the GPU kernels can serve this problem.

        on_cpu: the reference runs, which refuses the same but for float32.
        """
        self.check_dtypes()
        if self.is_8bit:
            self._check_8bit()
        elif not (self.dtype_q.is_float16 or on_cpu):
            remedy = "cast q to float16 or bfloat16"
            raise UnsupportedError(
                f"q: dtype {self.dtype_q} has no GPU kernel; {remedy} (CPU arrays take float32 too)"
            )
        if self.is_wide:
            self._check_wide()
            if self.logits is not None:
                raise UnsupportedError(
                    f"{self.logits.name}: is not supported with head dims {self.head_dim_qk} and "
                    f"{self.head_dim_vo}; wanted head dims up to {MAX_HEAD_DIM}"
                )
            return
        for label, dim in (("qk", self.head_dim_qk), ("vo", self.head_dim_vo)):
            if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
                raise UnsupportedError(
                    f"head_dim_{label}: {dim} is not supported; wanted a multiple of 8 from 8 to "
                    f"{MAX_HEAD_DIM}"
                )
        if self.pos_encoding == "ROPE_LLAMA" and self.head_dim_qk % 16:
            raise UnsupportedError(
                f"pos_encoding_mode: ROPE_LLAMA rotates halves of the head dim in vectors of 8, so "
                f"it needs head_dim_qk to be a multiple of 16, got {self.head_dim_qk}"
            )

    def _check_8bit(self) -> None:
        """Raise UnsupportedError unless queries of 8 bits can be served on some card."""
        if self.latent or (self.is_wide and self.dtype_q is dtypes.int8):
            dims = self.head_dim_qk, self.head_dim_vo
            what = "latent keys" if self.latent else f"head dims {dims[0]} and {dims[1]}"
            raise UnsupportedError(
                f"q: dtype {self.dtype_q} is not supported with {what}; cast q to float16 or "
                "bfloat16"
            )

    def _check_wide(self) -> None:
        """Raise UnsupportedError unless the kernels of wide heads can serve this problem."""
        dims = self.head_dim_qk, self.head_dim_vo
        if self.latent:
            latent, rope = self.head_dim_vo, self.head_dim_qk - self.head_dim_vo
            if (latent, rope) not in LATENT_HEAD_DIMS:
                wanted = ", ".join(f"{a} and {b}" for a, b in LATENT_HEAD_DIMS)
                raise UnsupportedError(
                    f"head_dim_ckv, head_dim_kpe: {latent} and {rope} are not supported; wanted "
                    f"{wanted}"
                )
        elif dims not in WIDE_HEAD_DIMS:
            wanted = "a multiple of 64 up to 576 and 512 or 256"
            is_qk = dims[0] > MAX_HEAD_DIM and dims[0] not in {a for a, _ in WIDE_HEAD_DIMS}
            label, dim, other = ("qk", *dims) if is_qk else ("vo", *dims[::-1])
            raise UnsupportedError(
                f"head_dim_{label}: {dim} is not supported beside {other}; wanted head dims that "
                f"are multiples of 8 from 8 to {MAX_HEAD_DIM}, or (qk, vo) of {wanted}"
            )
        if self.pos_encoding == "ROPE_LLAMA" and (self.latent or self.dtype_kv.is_fp8):
            what = "latent keys" if self.latent else f"keys of {self.dtype_kv}"
            raise UnsupportedError(
                f"pos_encoding_mode: ROPE_LLAMA is not supported with head dims {dims[0]} and "
                f"{dims[1]} of {what}; rotate q and k before the call"
            )
