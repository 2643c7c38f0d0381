"""The one record of what an attention call asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import dtypes
from .dtypes import DType
from .key_share import KeyShare
from .logits import LogitsExpression
from .problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Everything that callers choose but lengths and arrays; see engine/spec.py for the checks.

    dtype_kv      of values, and of keys unless int8 queries want them in int8 (`dtype_k`)
    page_size     tokens of a page; 0 for keys in rows
    value_pages   entries of a page table from the id of a key's page to that of its value's; 0: the
                  pages are the same
    mask_form     of a custom mask (problem.MASK_FORMS), None without one
    causal        holds besides a mask: False where a mask of the caller's replaces it
    window_left, window_right  keys to the left and right of a row's own that it sees, -1 for all
    sm_scale      multiplies the logits, output_scale the output; positive or negative, finite
    logits_soft_cap  0 for none
    latent        a value is the first head_dim_vo columns of its key
    sparse        a list names the rows of the cache that are keys, and negative numbers for none
    logits        expressions of the caller's; a mask of its own has mask_form "expression"
    key_share     the keys of this rank, where ranks share those of every request; else None
    skip_softmax  tiles of keys may be left out whose probabilities are less than this factor
                  divided by the request's keys; 0: none are
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype_q: DType
    dtype_kv: DType
    dtype_o: DType
    kv_layout: str = "NHD"
    page_size: int = 0
    mask_form: str | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    pos_encoding: str = "NONE"
    logits_soft_cap: float = 0.0
    sm_scale: float = 1.0
    output_scale: float = 1.0
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    value_pages: int = 0
    latent: bool = False
    sparse: bool = False
    logits: LogitsExpression | None = None
    key_share: KeyShare | None = None
    skip_softmax: float = 0.0

    @property
    def right_limit(self) -> int:
        """What window_right is with causality, which is a right window of 0."""
        return 0 if self.causal else self.window_right

    @property
    def sees_by_position(self) -> bool:
        """Whether a row may not see all keys, so that their places in the sequence count."""
        is_limited = self.window_left >= 0 or self.right_limit >= 0
        return is_limited or self.mask_form == "rows"

    @property
    def dtype_k(self) -> DType:
        """The dtype of keys: int8 beside int8 queries, else that of values."""
        return self.dtype_q.of_keys or self.dtype_kv

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def problem(self, *, aligned: bool = True, prescale_logits: bool = False) -> AttentionProblem:
        """What kernels are compiled for."""
        return AttentionProblem(
            dtype_q=self.dtype_q,
            dtype_kv=self.dtype_kv,
            dtype_o=self.dtype_o,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            pos_encoding=self.pos_encoding,
            soft_cap=self.logits_soft_cap > 0.0,
            custom_mask=self.mask_form is not None,
            mask_form=self.mask_form or "whole",
            prescale_logits=prescale_logits or self.sm_scale <= 0.0,
            aligned=aligned,
            paged=self.page_size > 0,
            own_value_pages=self.value_pages > 0,
            latent=self.latent,
            sparse=self.sparse,
            logits=None if self.logits is None else self.logits.compiled,
            key_share=self.key_share is not None and self.sees_by_position,
            skips_tiles=self.skip_softmax > 0.0,
        )

    def with_row_mask(self) -> AttentionSpec:
        """The spec of a run that brings a mask of its own over the last keys."""
        return replace(self, causal=False, mask_form="rows")

    def as_on_gpu(self) -> AttentionSpec:
        """The spec with float16 for float32, which only the CPU takes, and keys like them."""
        if self.dtype_q is not dtypes.float32:
            return self
        dtype_kv = self.dtype_kv if self.dtype_kv.is_fp8 else dtypes.float16
        return replace(self, dtype_q=dtypes.float16, dtype_kv=dtype_kv)

    def reference_options(self) -> dict[str, Any]:
        """The keyword arguments of `reference.attention`."""
        return {
            "causal": self.causal,
            "window_left": self.window_left,
            "window_right": self.window_right,
            "logits_soft_cap": self.logits_soft_cap,
            "sm_scale": self.sm_scale,
            "pos_encoding_mode": self.pos_encoding,
            "rope_scale": self.rope_scale,
            "rope_theta": self.rope_theta,
            "logits": self.logits,
        }
