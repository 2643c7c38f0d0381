"""Stand-ins of an engine's objects, with the names that FlashAttentionBackend reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyattn.serving import FlashAttentionBackend, FlashAttentionMultiStepBackend

MAX_REQS, CONTEXT = 8, 64


def slots(page_size: int) -> np.ndarray:
    """req_to_token [8, 64]: with pages of one, token t of row r is in slot 100 r + t + 10; with
    larger ones row r owns the pages from 10 r + 1 on."""
    rows, tokens = np.arange(MAX_REQS)[:, None], np.arange(CONTEXT)
    if page_size == 1:
        return (100 * rows + tokens + 10).astype(np.int32)
    pages = 10 * rows + 1 + tokens // page_size
    return (pages * page_size + tokens % page_size).astype(np.int32)


def runner(page_size: int = 1, table: Any = None, **changes: Any) -> SimpleNamespace:
    """A model runner; `changes` are put where SGLang has them."""
    args = {
        "speculative_eagle_topk": changes.pop("topk", None),
        "speculative_num_draft_tokens": changes.pop("num_draft_tokens", None),
        "enable_deterministic_inference": changes.pop("deterministic", False),
        "kv_cache_dtype": "auto",
    }
    model = {
        "context_len": changes.pop("context_len", CONTEXT),
        "attention_arch": SimpleNamespace(name=changes.pop("arch", "MHA")),
        "is_encoder_decoder": changes.pop("is_encoder_decoder", False),
    }
    made = {
        "server_args": SimpleNamespace(**args),
        "model_config": SimpleNamespace(**model),
        "req_to_token_pool": SimpleNamespace(
            req_to_token=slots(page_size) if table is None else table
        ),
        "token_to_kv_pool": None,
        "page_size": page_size,
        "sliding_window_size": None,
        "attention_chunk_size": None,
        "is_hybrid": False,
        "device": "cpu",
        "kv_cache_dtype": None,
    }
    return SimpleNamespace(**{**made, **changes})


def batch(mode: Any, lens: Any, req: Any, **changes: Any) -> SimpleNamespace:
    """A ForwardBatch."""
    lens, req = np.asarray(lens, np.int64), np.asarray(req, np.int64)
    made: dict[str, Any] = {
        "forward_mode": SimpleNamespace(name=mode) if isinstance(mode, str) else mode,
        "batch_size": lens.size,
        "seq_lens": lens,
        "seq_lens_cpu": lens,
        "seq_lens_sum": int(lens.sum()),
        "req_pool_indices": req,
        "spec_info": None,
        "encoder_lens": None,
        "out_cache_loc": None,
    }
    if "extend" in changes:
        extend = np.asarray(changes.pop("extend"), np.int64)
        made["extend_seq_lens"], made["extend_seq_lens_cpu"] = extend, extend.tolist()
        made["extend_prefix_lens_cpu"] = (lens - extend).tolist()
    return SimpleNamespace(**{**made, **changes})


def backend(page_size: int = 1, step: int = 0, steps: int = 0, **changes: Any) -> Any:
    form = changes.pop("tree_form", "mask")
    return FlashAttentionBackend(
        runner(page_size, **changes),
        speculative_step_id=step,
        speculative_num_steps=steps,
        tree_form=form,
    )


def multi_step(steps: int, page_size: int = 1, **changes: Any) -> FlashAttentionMultiStepBackend:
    topk = changes.get("topk") or 1
    return FlashAttentionMultiStepBackend(runner(page_size, **changes), topk, steps)


def layer(
    layer_id: int = 0, heads: int = 2, kv_heads: int = 1, dim: int = 8, **changes: Any
) -> Any:
    """A RadixAttention."""
    made: dict[str, Any] = {
        "layer_id": layer_id,
        "tp_q_head_num": heads,
        "tp_k_head_num": kv_heads,
        "tp_v_head_num": kv_heads,
        "head_dim": dim,
        "v_head_dim": dim,
        "scaling": 1.0,
        "logit_cap": 0.0,
        "sliding_window_size": None,
        "is_cross_attention": False,
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**{**made, **changes})


TREE_A = "1000/1100/1010/1101"
TREE_B = "1000/1100/1110/1001"


def flat_mask(lens: Any, *trees: str) -> np.ndarray:
    """SGLang's custom_mask: each request's prefix, all ones, before its tree."""
    parts = []
    for n, tree in zip(lens, trees, strict=True):
        for row in tree.split("/"):
            parts += [1] * int(n) + [int(x) for x in row]
    return np.array(parts, bool)
