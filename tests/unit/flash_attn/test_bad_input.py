"""Bad input of flash_attn's functions: a typed error, and nothing is written.

Each row changes arguments of a good call. What only a GPU refuses is in test_launch.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.bad_input import Row, by_row, ints, of, read_only, refuse, rows_of

from cupyattn import flash_attn
from cupyattn.errors import UnsupportedError

B, S, SK, H, HK, D, PAGES, PAGE, WIDTH = 3, 2, 12, 4, 2, 16, 8, 4, 5
func, varlen, paged, cache, append, combine, merge, plan = map(
    rows_of,
    (
        *("flash_attn_func", "flash_attn_varlen_func", "varlen paged", "flash_attn_with_kvcache"),
        *("append", "flash_attn_combine", "merge_state_v2", "get_scheduler_metadata"),
    ),
)
TABLE = np.arange(B * WIDTH, dtype=np.int32).reshape(B, WIDTH) % PAGES
F32 = "float32"


def good(call: str) -> dict[str, Any]:
    if call == "flash_attn_func":
        return {"q": of(F32, B, S, H, D), "k": of(F32, B, SK, HK, D), "v": of(F32, B, SK, HK, D)}
    if call == "flash_attn_varlen_func":
        lens = {"cu_seqlens_q": ints(0, 2, 2, 6), "cu_seqlens_k": ints(0, 5, 9, 12)}
        arrays = {"q": of(F32, 6, H, D), "k": of(F32, 12, HK, D), "v": of(F32, 12, HK, D)}
        return {**arrays, **lens, "max_seqlen_q": 4, "max_seqlen_k": 5}
    if call == "varlen paged":
        pages = of(F32, PAGES, PAGE, HK, D)
        arrays = {"q": of(F32, 6, H, D), "k": pages, "v": pages.copy(), "block_table": TABLE.copy()}
        return {**arrays, "cu_seqlens_q": ints(0, 2, 2, 6), "seqused_k": ints(9, 0, 20)}
    if call in ("flash_attn_with_kvcache", "append"):
        caches = {"k_cache": of(F32, B, SK, HK, D), "v_cache": of(F32, B, SK, HK, D)}
        arrays = {"q": of(F32, B, S, H, D), **caches, "cache_seqlens": ints(3, 0, 10)}
        if call == "append":
            arrays |= {"k": of(F32, B, 2, HK, D), "v": of(F32, B, 2, HK, D)}
        return arrays
    if call == "flash_attn_combine":
        return {"out_partial": of(F32, 3, B, S, H, D), "lse_partial": of(F32, 3, B, S, H)}
    if call == "merge_state_v2":
        v, s = of(F32, 6, H, D), of(F32, 6, H)
        return {"v_a": v, "s_a": s, "v_b": v.copy(), "s_b": s.copy()}
    numbers = {"batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": 9, "headdim": 16}
    return {**numbers, "num_heads_q": 4, "num_heads_kv": 2, "cache_seqlens": ints(3, 0, 9)}


def strided(x: np.ndarray) -> np.ndarray:
    return np.repeat(x, 2, axis=-1)[..., ::2]


ROWS: list[Row] = [
    func("q of three axes", "q: shape is | [batch, seqlen, heads, head_dim]", q=of(F32, 6, H, D)),
    func("k of three axes", "k: shape is | four dimensions", k=of(F32, 6, HK, D)),
    func("no q", "q: got NoneType", q=None),
    func("a list", "v: got list", v=[1.0]),
    func("requests of k", "k: holds 2 requests and q 3", k=of(F32, 2, SK, HK, D),
         v=of(F32, 2, SK, HK, D)),
    func("tokens of v", "v: shape is | the same but for head_dim", v=of(F32, B, 11, HK, D)),
    func("heads of v", "v: shape is | the same but for head_dim", v=of(F32, B, SK, 1, D)),
    func("heads", "3 query heads over 2 KV heads", q=of(F32, B, S, 3, D)),
    func("head dim", "k: dimension 2 | wanted 8, the head_dim_qk of q", q=of(F32, B, S, H, 8)),
    func("no head dim", "head_dim_qk: got 0", q=of(F32, B, S, H, 0), k=of(F32, B, SK, HK, 0)),
    func("odd large head dim", "head_dim_qk: 577 is not supported", UnsupportedError,
         q=of(F32, B, S, H, 577), k=of(F32, B, SK, HK, 577)),
    func("head dim of k", "k: dimension 2 | wanted 12, the head_dim_qk of q",
         q=of(F32, B, S, H, 12)),
    func("padded out", "out: shape is [3, 2, 4, 16]; wanted [3, 2, 4, 12]",
         v=of(F32, B, SK, HK, 12), out=of(F32, B, S, H, D)),
    func("padded out that is q", "out: overlaps q", q=of(F32, B, S, H, 12),
         k=of(F32, B, SK, HK, 12), v=of(F32, B, SK, HK, 12), out=lambda a: a["q"]),
    func("large head dim", "head_dim_vo: 520 is not supported", UnsupportedError,
         v=of(F32, B, SK, HK, 520)),
    func("strided q", "q: the last dimension has stride", q=strided(of(F32, B, S, H, D))),
    func("strided v", "v: the last dimension has stride", v=strided(of(F32, B, SK, HK, D))),
    func("dtype of q", "q: dtype int32 is not supported", 
         q=of("int32", B, S, H, D)),
    func("dtypes differ", "dtype float16 with q of dtype float32", k=of("float16", B, SK, HK, D),
         v=of("float16", B, SK, HK, D)),
    func("k and v differ", "v: dtype is float16 but k is float32", v=of("float16", B, SK, HK, D)),
    func("scale", "softmax_scale: got 'x'", softmax_scale="x"),
    func("infinite scale", "softmax_scale: got inf", softmax_scale=float("inf")),
    func("causal", "causal: got 0.5", causal=0.5),
    func("a scale of zero", "softmax_scale: got 0, with which all keys weigh the same",
         softmax_scale=0),
    func("FA3's order", "softmax_scale: got True", dropout_p=None, softmax_scale=True),
    func("a window in an array of three", "window_size: got an array of shape [3]",
         window_size=ints(1, 2, 3)),
    func("a window in an array of floats", "window_size: got 1.5", window_size=of(F32, 2) + 1.5),
    func("window of one", "window_size: got 3", window_size=3),
    func("window of three", "window_size: got (1, 2, 3)", window_size=(1, 2, 3)),
    func("negative window", "window_size: got -2", window_size=(-2, 0)),
    func("window of floats", "window_size: got 1.5", window_size=(1.5, 0)),
    func("chunk", "attention_chunk: got -1", attention_chunk=-1),
    func("chunk of a float", "attention_chunk: got 1.5", attention_chunk=1.5),
    func("soft cap", "softcap: got -1.0", softcap=-1.0),
    func("NaN for a soft cap", "softcap: got nan", softcap=float("nan")),
    func("splits", "num_splits: got -1", num_splits=-1),
    func("dropout", "dropout_p: got 0.1, and there is no dropout here", UnsupportedError,
         dropout_p=0.1),
    func("dropout of a string", "dropout_p: got 'a'", dropout_p="a"),
    func("heads of qv", "qv: shape is [3, 2, 2, 16]; wanted [3, 2, 4, 16]",
         qv=of(F32, B, S, HK, D)),
    func("dtype of qv", "qv: is of float16 beside q of float32", UnsupportedError,
         qv=of("float16", B, S, H, D)),
    func("keys beside qv", "k, v: shapes are", k=of(F32, B, SK, HK, 8), qv=of(F32, B, S, H, D)),
    func("both sinks", "sinks, s_aux: are two names", sinks=of(F32, H), s_aux=of(F32, H)),
    func("size of sinks", "sinks: shape is [3]", sinks=of(F32, 3)),
    func("dtype of sinks", "sinks: dtype is int32", sinks=of("int32", H)),
    func("size of slopes", "alibi_slopes: shape is [3]", alibi_slopes=of(F32, 3)),
    func("requests of slopes", "alibi_slopes: shape is [2, 4]", alibi_slopes=of(F32, 2, H)),
    func("dtype of slopes", "alibi_slopes: dtype is float16", alibi_slopes=of("float16", H)),
    func("shape of out", "out: shape is [3, 2, 4, 8]; wanted [3, 2, 4, 16]", out=of(F32, B, S, H,
         8)),
    func("axes of out", "out: shape [6, 4, 16] has 3 dimensions", out=of(F32, 6, H, D)),
    func("dtype of out", "int32 is not a supported output", out=of("int32", B,
         S, H, D)),
    func("read-only out", "out: a read-only array", out=lambda a: read_only(of(F32, B, S, H, D))),
    func("out is q", "out: overlaps q", out=lambda a: a["q"]),
    func("out is k", "out: overlaps k", q=of(F32, B, SK, HK, D), out=lambda a: a["k"]),
    func("flag", "return_softmax_lse: got 3", return_softmax_lse=3),
    func("shape of a descale", "k_descale: shape is [5]; wanted one number, [2], or [3, 2]",
         k=of("float8_e4m3fn", B, SK, HK, D), v=of("float8_e4m3fn", B, SK, HK, D),
         k_descale=of(F32, 5)),
    func("dtype of a descale", "v_descale: dtype is float16", q=of("float16", B, S, H, D),
         k=of("float8_e4m3fn", B, SK, HK, D), v=of("float8_e4m3fn", B, SK, HK, D),
         v_descale=of("float16", HK)),
    varlen("q of four axes", "q: shape is | [rows, heads, head_dim], with cu_seqlens_q",
           q=of(F32, 1, 6, H, D)),
    varlen("no offsets of q", "cu_seqlens_q: got None", cu_seqlens_q=None),
    varlen("no lengths of k", "cu_seqlens_k: got None without seqused_k", cu_seqlens_k=None),
    varlen("offsets of q", "cu_seqlens_q: shape is [3]; wanted [4]", cu_seqlens_q=ints(0, 2, 6)),
    varlen("offsets of k", "cu_seqlens_q: shape is [4]; wanted [3]", cu_seqlens_k=ints(0, 5, 12)),
    varlen("dtype of offsets", "cu_seqlens_k: float32 of shape", cu_seqlens_k=of(F32, 4)),
    varlen("dtype of q's offsets", "cu_seqlens_q: dtype is float32", cu_seqlens_q=of(F32, 4)),
    varlen("offsets of q that begin late", "cu_seqlens_q: begins at 1; wanted offsets from 0 on",
           cu_seqlens_q=ints(1, 2, 2, 6)),
    varlen("offsets of k that begin late", "cu_seqlens_k: begins at 1; wanted offsets from 0 on",
           cu_seqlens_k=ints(1, 5, 9, 12)),
    varlen("offsets past q", "cu_seqlens_q: request 2 has 5 from 2 on, and",
           cu_seqlens_q=ints(0, 2, 2, 7)),
    varlen("falling offsets", "cu_seqlens_q: request 1 has -1", cu_seqlens_q=ints(0, 2, 1, 6)),
    varlen("offsets past k", "cu_seqlens_k: request 2 has 4 from 9 on, and",
           cu_seqlens_k=ints(0, 5, 9, 13)),
    varlen("keys used", "cu_seqlens_q: shape is [4]; wanted [3]", seqused_k=ints(1, 2)),
    varlen("rows used", "seqused_q: shape is [2]; wanted [3]", seqused_q=ints(1, 2)),
    varlen("most rows", "max_seqlen_q: got -1", max_seqlen_q=-1),
    varlen("most rows as an array", "max_seqlen_q: shape is [3]", max_seqlen_q=ints(1, 2, 3)),
    varlen("most keys", "max_seqlen_k: got 'x'", max_seqlen_k="x"),
    varlen("context parallel", "block_table: got None where ranks share", UnsupportedError,
           cp_world_size=2),
    *[
        varlen(name, f"{name}: is not supported", UnsupportedError, **{name: of(F32, 1)})
        for name in (
            *("output_scale", "score_mod", "mask_mod", "block_sparse_tensors"),
            *("aux_tensors", "aux_tensor_leading_dims"),
        )
    ],
    varlen("flags without causality", "dynamic_causal: says which requests of a causal call are",
           dynamic_causal=ints(1, 0, 1)),
    varlen("too few flags", "dynamic_causal: dimension 0", causal=True, dynamic_causal=ints(1, 0)),
    varlen("flags of floats", "dynamic_causal: dtype", causal=True, dynamic_causal=of(F32, 3)),
    varlen("flags and chunks", "dynamic_causal: is not supported with attention", UnsupportedError,
           causal=True, attention_chunk=2, dynamic_causal=ints(1, 0, 1)),
    varlen("vLLM's qv", "qv: is not supported", UnsupportedError, q_v=of(F32, 1)),
    paged("both tables", "block_table, page_table: are two names", page_table=TABLE),
    paged("axes of the table", "block_table: shape is [15]", block_table=TABLE.reshape(-1)),
    paged("dtype of the table", "block_table: dtype is uint8", block_table=TABLE.astype("uint8")),
    paged("rows of the table", "seqused_k: shape is [3]; wanted [2]", block_table=TABLE[:2]),
    paged("a page that is not there", "block_table: request 0 has page 99",
          block_table=TABLE + 99),
    paged("a page of -1 in use", "block_table: request 0 has page -1", block_table=TABLE * 0 - 1),
    paged("more keys than pages", "seqused_k: request 2 has 21, and",
          seqused_k=ints(9, 0, 21)),
    paged("negative length", "seqused_k: request 0 has -1", seqused_k=ints(-1, 0, 20)),
    paged("pages of no token", "has pages of no token", k=of(F32, PAGES, 0, HK, D),
          v=of(F32, PAGES, 0, HK, D)),
    cache("requests of the cache", "cache_seqlens: shape is [3]; wanted [2]",
          k_cache=of(F32, 2, SK, HK, D), v_cache=of(F32, 2, SK, HK, D)),
    cache("requests of q", "q: holds 4 rows; wanted 6", q=of(F32, 2, S, H, D)),
    cache("both tables", "page_table, block_table: are two names", page_table=TABLE,
          block_table=TABLE),
    cache("a length past the cache", "cache_seqlens: request 1 has 13", cache_seqlens=ints(1, 13,
         2)),
    cache("a length of no array", "cache_seqlens: got -1", cache_seqlens=-1),
    cache("a float for a length", "cache_seqlens: got float", cache_seqlens=2.0),
    cache("row of the cache", "cache_batch_idx: request 2 has page 3; the cache holds 3",
          cache_batch_idx=ints(0, 1, 3)),
    cache("row of the table", "cache_batch_idx: [0, 1, 3]", cache_batch_idx=ints(0, 1, 3),
          k_cache=of(F32, PAGES, PAGE, HK, D), v_cache=of(F32, PAGES, PAGE, HK, D),
          page_table=TABLE),
    cache("axes of rows", "cache_batch_idx: shape is [3, 1]", cache_batch_idx=ints(0, 1, 2)[:,
         None]),
    cache("padding past the keys", "cache_leftpad: request 1 begins at key 1 of 0",
          cache_leftpad=ints(0, 1, 0)),
    cache("negative padding", "cache_leftpad: request 0 begins at key -1",
          cache_leftpad=ints(-1, 0, 0)),
    cache("size of padding", "cache_leftpad: shape is [2]", cache_leftpad=ints(0, 0)),
    cache("rotation without keys", "rotary_cos: given without k and v", rotary_cos=of(F32, 20, 8),
          rotary_sin=of(F32, 20, 8)),
    cache("score_mod", "score_mod: is not supported", UnsupportedError, score_mod=len),
    append("k alone", "k, v: got one of the two", v=None),
    append("no lengths", "cache_seqlens: got None", cache_seqlens=None),
    append("a cache that is full",
         "cache_seqlens: request 2 has 13, and", cache_seqlens=ints(3,
         0, 11)),
    append("requests of k", "k: holds 2 requests but cache_seqlens 3", k=of(F32, 2, 2, HK, D),
           v=of(F32, 2, 2, HK, D)),
    append("tokens of v", "v: shape is [3, 1, 2, 16] with k of [3, 2, 2, 16]",
           v=of(F32, B, 1, HK, D)),
    append("axes of k", "k: shape is [6, 2, 16]", k=of(F32, 6, HK, D)),
    append("dtype of k", "k: dtype is float16 but k_cache is float32", k=of("float16", B, 2, HK,
         D)),
    append("heads of k", "k: shape is [3, 2, 1, 16] with k_cache of", k=of(F32, B, 2, 1, D),
           v=of(F32, B, 2, 1, D)),
    append("read-only cache", "read-only", k_cache=lambda a: read_only(of(F32, B, SK, HK, D))),
    append("offsets of k", "k: shape is [3, 2, 2, 16]; wanted [rows", cu_seqlens_k_new=ints(0, 1,
         2, 3)),
    append("a bad page beside", "page_table: request 1 has page 77", cache_seqlens=ints(3, 1, 10),
           k_cache=of(F32, PAGES, PAGE, HK, D), v_cache=of(F32, PAGES, PAGE, HK, D),
           page_table=np.where(np.arange(B)[:, None] == 1, 77, TABLE).astype(np.int32)),
    append("cos alone", "rotary_cos, rotary_sin: got one", rotary_cos=of(F32, 20, 8)),
    append("cos of another shape", "rotary_cos, rotary_sin: shapes are", rotary_cos=of(F32, 20, 8),
           rotary_sin=of(F32, 20, 4)),
    append("cos of few positions", "rotary_cos: has 9 positions; q needs position 11", causal=True,
           rotary_cos=of(F32, 9, 8), rotary_sin=of(F32, 9, 8)),
    append("cos of a larger head", "rotary_cos: turns 32 elements", rotary_cos=of(F32, 20, 16),
           rotary_sin=of(F32, 20, 16)),
    append("a bad option", "softcap: got -2", softcap=-2),
    combine("axes", "out_partial: shape is [3, 4, 16]", out_partial=of(F32, 3, H, D)),
    combine("shape of the LSE", "lse_partial: shape is", lse_partial=of(F32, 3, B, H, S)),
    combine("shape of out", "out: shape is [2, 4, 16]", out=of(F32, S, H, D)),
    combine("dtype of out", "out_dtype: got float16, but out is float32",
            out=of(F32, B, S, H, D), out_dtype="float16"),
    merge("rows of s", "s_b: dimension 0", s_b=of(F32, 5, H)),
    merge("dtypes", "v_b: dtype is float16 but v_a is float32", v_b=of("float16", 6, H, D)),
    merge("an LSE of integers", "s_a: dtype is int32", s_a=of("int32", 6, H)),
    plan("requests", "batch_size: got -1", batch_size=-1),
    plan("heads", "num_heads_kv: got 0", num_heads_kv=0),
    plan("lengths", "cache_seqlens: got int", cache_seqlens=3),
]  # fmt: skip


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    name = {"varlen paged": "flash_attn_varlen_func", "append": "flash_attn_with_kvcache"}
    refuse(row, getattr(flash_attn, name.get(row.call, row.call)), good(row.call))


def test_good_input() -> None:
    """Or rows would be refused for another reason."""
    for call in {row.call for row in ROWS}:
        name = {"varlen paged": "flash_attn_varlen_func", "append": "flash_attn_with_kvcache"}
        getattr(flash_attn, name.get(call, call))(**good(call))
