"""What a serving backend is told: its configuration, a layer, a batch and its drafts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ..core import dtypes, parse
from ..core.parse import require_int
from ..errors import ArgumentError, UnsupportedError
from ..launch.ops.serving_metadata import MAX_ROWS

TREE_FORMS = "mask", "expand"


class ForwardMode(IntEnum):
    """What the query tokens of a batch are.

    DECODE one token of each request, already counted in seq_lens DRAFT_DECODE topk tokens of each
    request, drafted one step after seq_lens TARGET_VERIFY num_draft_tokens of each request, behind
    its seq_lens keys EXTEND the last extend_seq_lens tokens of seq_lens, prompts or parts of them
    DRAFT_EXTEND the same of accepted tokens MIXED EXTEND in which some requests decode IDLE
    nothing, or padding that is handled as DECODE
    """

    DECODE = 0
    DRAFT_DECODE = 1
    TARGET_VERIFY = 2
    EXTEND = 3
    DRAFT_EXTEND = 4
    MIXED = 5
    IDLE = 6

    # Modes are keys of dictionaries at every step, and an enum's own hash is a function in Python.
    __hash__ = int.__hash__

    def __init__(self, value: int) -> None:
        # Whether requests have different numbers of query tokens: EXTEND, DRAFT_EXTEND, MIXED.
        self.is_ragged = value in (3, 4, 5)


@dataclass(frozen=True)
class BackendConfig:
    """What all steps of an engine share.

    Parameters
    ----------
    num_q_heads, num_kv_heads, head_dim, v_head_dim
        Of this GPU; v_head_dim None: head_dim.
    page_size
        Tokens of a page; each page of a request holds consecutive tokens.
    max_context_len
        Keys of one request at most, drafts included.
    q_dtype, kv_dtype
        Dtypes of any framework, or their names, which they become; the pool must be of kv_dtype,
        default: of q_dtype. None: as the arrays are.
    use_mla
        The pool has latent rows, whose first v_head_dim of head_dim columns are values too, and
        queries are absorbed; num_kv_heads is 1. Layers have no windows, chunks or encoder, and
        trees are verified in two passes.
    attention_chunk_size
        Keys of a chunk of layers with local attention; None: no such layers.
    sliding_window_size
        The widest window of a layer, keys before a row's own; None: no such layers.
    topk
        Drafted tokens of a step, beams of a request.
    num_draft_steps
        Steps of a multi-step draft.
    num_draft_tokens
        Tokens of a verification; 0: there is none.
    deterministic
        Keys are not split, so outputs don't depend on the other requests.
    is_hybrid
        Layers with a window or chunks may keep their keys in a second pool.
    has_encoder
        Requests begin with encoder tokens, which cross attention reads.
    tree_form
        How trees are verified: "mask", one pass over all keys, or "expand", two passes and a merge.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import serving
    >>> config = serving.BackendConfig(8, 2, 64, page_size=16, max_context_len=64)
    >>> config.shape_of(serving.LayerSpec(layer_id=0))
    (8, 2, 64, 64)
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    page_size: int = 1
    max_context_len: int = 4096
    q_dtype: Any = None
    kv_dtype: Any = None
    use_mla: bool = False
    attention_chunk_size: int | None = None
    sliding_window_size: int | None = None
    topk: int = 1
    num_draft_steps: int = 0
    num_draft_tokens: int = 0
    deterministic: bool = False
    is_hybrid: bool = False
    has_encoder: bool = False
    tree_form: str = "mask"

    def __post_init__(self) -> None:
        self._require_sizes()
        self._parse_dtypes()
        for name in ("use_mla", "deterministic", "is_hybrid", "has_encoder"):
            parse.flag(getattr(self, name), name)
        parse.choice(self.tree_form, TREE_FORMS, "tree_form")
        if self.use_mla:
            object.__setattr__(self, "tree_form", "expand")
            if self.num_kv_heads != 1:
                raise ArgumentError(
                    f"num_kv_heads: got {self.num_kv_heads}; a latent pool has one head, pass 1"
                )
        if self.attention_chunk_size is not None:
            require_int(self.attention_chunk_size, "attention_chunk_size")
        if self.sliding_window_size is not None:
            require_int(self.sliding_window_size, "sliding_window_size", -1)
            if self.sliding_window_size < 0:
                object.__setattr__(self, "sliding_window_size", None)
        for name in ("topk", "num_draft_tokens"):
            if getattr(self, name) > MAX_ROWS:
                raise UnsupportedError(
                    f"{name}: got {getattr(self, name)}; at most {MAX_ROWS} are supported"
                )
        self._require_supported_layers()

    def _require_sizes(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "page_size", "max_context_len"):
            require_int(getattr(self, name), name)
        for name in ("topk", "num_draft_steps", "num_draft_tokens"):
            require_int(getattr(self, name), name, 0)
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        require_int(self.v_head_dim, "v_head_dim")
        if self.num_q_heads % self.num_kv_heads:
            raise ArgumentError(
                f"num_q_heads: {self.num_q_heads} over {self.num_kv_heads} KV heads; wanted a "
                "multiple"
            )

    def _parse_dtypes(self) -> None:
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", self.q_dtype)
        for name in ("q_dtype", "kv_dtype"):
            dtype = getattr(self, name)
            if dtype is not None:
                object.__setattr__(self, name, dtypes.parse(dtype, name).name)

    def _require_supported_layers(self) -> None:
        for name in ("attention_chunk_size", "is_hybrid", "has_encoder"):
            if self.use_mla and getattr(self, name) not in (None, False):
                raise UnsupportedError(
                    f"{name}: got {getattr(self, name)}; latent attention has no such layers, "
                    "leave it out"
                )
        if self.is_hybrid and self.has_encoder:
            raise UnsupportedError(
                "is_hybrid, has_encoder: a second pool cannot hold encoder tokens; pass one "
                "of the two"
            )
        if self.is_hybrid and self.attention_chunk_size is not None:
            if self.attention_chunk_size % self.page_size:
                raise UnsupportedError(
                    f"attention_chunk_size: {self.attention_chunk_size} keys are no whole number "
                    f"of pages of {self.page_size}, which a second pool needs; choose one to fit"
                )

    def shape_of(self, layer: LayerSpec) -> tuple[int, int, int, int]:
        """(query heads, KV heads, head_dim, v_head_dim) of a layer."""
        dim_v = layer.v_head_dim
        if dim_v is None:
            dim_v = self.v_head_dim if layer.head_dim is None else layer.head_dim
        return (
            layer.num_q_heads or self.num_q_heads,
            layer.num_kv_heads or self.num_kv_heads,
            layer.head_dim or self.head_dim,
            dim_v or self.head_dim,
        )

    @property
    def has_beams(self) -> bool:
        """Whether drafts branch: what one token sees of the others is a tree."""
        return self.topk > 1


@dataclass(frozen=True)
class LayerSpec:
    """What attention of one layer does; immutable.

    Parameters
    ----------
    layer_id
        Of the KV pool.
    softmax_scale
        Of the logits; None: 1 / sqrt(head_dim).
    softcap
        c > 0: logits become c * tanh(logit / c).
    window_size
        (left, right) keys beside a row's own, both ends included; -1: all. With causal attention
        right is 0.
    attention_chunk
        Keys of a chunk: a row sees its own chunk alone; 0: all. As configured.
    is_cross_attention
        Keys are those of the encoder, all of them.
    causal
        Rows see keys up to their own.
    q_scale
        What queries of 8 bits are multiplied by: a number, or a float32 array of one element; no
        effect on queries of 16 bits.
    k_scale, v_scale
        What fp8 keys and values are multiplied by: numbers, or float32 arrays of one element or of
        one for each KV head; no effect on other dtypes.
    sinks
        float32 [num_q_heads]: natural, unscaled logits of keys without values.
    uses_swa_pool
        Its keys are in the second pool of a hybrid.
    num_q_heads, num_kv_heads, head_dim, v_head_dim
        None: as configured.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import serving
    >>> layer = serving.LayerSpec(layer_id=3, window_size=(4095, 0))
    >>> layer.causal
    True
    """

    layer_id: int = 0
    softmax_scale: float | None = None
    softcap: float = 0.0
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    is_cross_attention: bool = False
    causal: bool = True
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sinks: Any = None
    uses_swa_pool: bool = False
    num_q_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None


@dataclass
class DraftInfo:
    """Drafts of a batch.

    Parameters
    ----------
    step
        Of DRAFT_DECODE, from 0 on.
    tree_mask
        Of TARGET_VERIFY with topk > 1: what each draft token sees, itself included. Bools [bs, D,
        D]; or uint64 or int64 words [bs, D], the lowest bit for the first token; or flat bools,
        request by request [D, seq_len + D].
    beam_rows
        int32 [bs * topk, num_draft_steps]: the beam that wrote the token of each step of a beam, if
        beams change parents; default: the beam itself.
    num_real
        Requests before the padding of a graph, whose part of the mask is not read; default: all.
    """

    step: int = 0
    tree_mask: Any = None
    beam_rows: Any = None
    num_real: int | None = None


@dataclass
class BatchInfo:
    """A batch: device arrays, and what the scheduler's host knows of them.

    Parameters
    ----------
    mode
        What the step does.
    req_pool_indices
        int32 or int64 [bs], rows of req_to_token.
    seq_lens
        int32 or int64 [bs], keys of each request, without drafts.
    seq_lens_host
        The same in NumPy, or None: then max_context_len bounds them.
    extend_seq_lens
        [bs] query tokens of each request, in ragged modes.
    extend_seq_lens_host
        The same in NumPy, or None with max_extend_len.
    max_extend_len
        Where the host knows no more: no request has more query tokens than that.
    out_cache_loc
        Slots of the new tokens; of DRAFT_DECODE with topk > 1 those of all steps, [bs, topk,
        num_draft_steps] in any shape.
    encoder_lens
        [bs] encoder tokens of each request, which come first in its row.
    encoder_lens_host
        The same in NumPy.
    draft
        Of a step with drafts: their tree.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import serving
    >>> batch = serving.BatchInfo(serving.ForwardMode.DECODE, np.array([3, 0]), np.array([7, 3]))
    >>> batch.mode.name
    'DECODE'
    """

    mode: ForwardMode
    req_pool_indices: Any
    seq_lens: Any
    seq_lens_host: np.ndarray | None = None
    extend_seq_lens: Any = None
    extend_seq_lens_host: np.ndarray | None = None
    out_cache_loc: Any = None
    encoder_lens: Any = None
    encoder_lens_host: np.ndarray | None = None
    draft: DraftInfo | None = None
    max_extend_len: int | None = None
