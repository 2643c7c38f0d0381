"""The batches that are measured, most wanted first within each op."""

from __future__ import annotations

from itertools import pairwise

from .case import BatchCase

_FA2 = "flashinfer_fa2"
_FA3 = "fa3"
_FLASHINFER_FA3 = "flashinfer_fa3"
_APART = "ours_apart"


def zipf_lengths(count: int, total: int) -> list[int]:
    """`count` lengths proportional to 1, 1/2, 1/3, …, `total` in all; longest first."""
    harmonic = sum(1 / rank for rank in range(1, count + 1))
    ends = [0.0]
    for rank in range(1, count + 1):
        ends.append(ends[-1] + total / harmonic / rank)
    edges = [round(end) for end in ends]
    return [stop - start for start, stop in pairwise(edges)]


def _decode(label: str, *requests: tuple[int, int], **more: object) -> BatchCase:
    options: dict[str, object] = {"goals": ((_FA2, 1.0), (_FA3, 0.95))}
    groups = tuple((count, 1, kv_len) for count, kv_len in requests)
    return BatchCase(f"decode_{label}", "batch_decode", "decode", groups, **(options | more))  # type: ignore[arg-type]


def _append(
    label: str, count: int, q_len: int, kv_len: int, page_size: int = 16,
    goals: tuple[tuple[str, float], ...] = ((_FA3, 0.97),),
) -> BatchCase:  # fmt: skip
    return BatchCase(
        f"append_{label}", "append", "paged", ((count, q_len, kv_len),), page_size, causal=True,
        goals=((_FA2, 1.0), *goals),
    )  # fmt: skip


def _ragged(label: str, *requests: tuple[int, int], **more: object) -> BatchCase:
    options: dict[str, object] = {"causal": True, "page_size": 0, "goals": ((_FA2, 1.0),)}
    groups = tuple((count, length, length) for count, length in requests)
    return BatchCase(f"ragged_{label}", "ragged", "ragged", groups, **(options | more))  # type: ignore[arg-type]


def _option(label: str, *goals: tuple[str, float], **more: object) -> BatchCase:
    return _ragged(f"4x4k_{label}", (4, 4096), goals=goals, **more)


def _cascade(
    label: str, count: int, shared: int, own: int, *goals: tuple[str, float], **more: object
) -> BatchCase:
    group = (count, 1, shared + own)
    return BatchCase(f"cascade_{label}", "cascade", "cascade", (group,), shared=shared,
                     goals=goals, **more)  # type: ignore[arg-type]  # fmt: skip


def _verify(q_len: int, mask: str = "none") -> BatchCase:
    """Draft tokens of 32 requests, in a chain or a tree; ideally as fast as one token."""
    name = f"verify_32x8k_q{q_len}" + ("_tree" if mask == "tree" else "")
    return BatchCase(
        name, "verify", "verify", ((32, q_len, 8192),), causal=mask == "none", mask=mask,
        against="verify_32x8k_q1" if q_len > 1 else "", goals=((_FA2, 1.0),),
    )  # fmt: skip


def _mla(
    label: str, *requests: tuple[int, int, int], best: float = 0.0, **more: object
) -> BatchCase:
    """Latent attention: (how many, query rows, keys) over a pool of 576 columns. best: the fastest
    peer's time over ours that is wanted."""
    options: dict[str, object] = {"page_size": 64, "causal": True}
    options |= {"goals": (("best", best),) if best else ()}
    options |= {"num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512}
    return BatchCase(f"mla_{label}", "mla", "mla", requests, **(options | more))  # type: ignore[arg-type]


def _sparse(label: str, tokens: int, **more: object) -> BatchCase:
    """Sparse latent attention: each token has a list of 2,048 slots of a pool."""
    return _mla(label, (tokens, 1, 2048), page_size=1, pool=1 << 17, **more)


def _eight_bits(
    label: str, count: int, rows: int, keys: int, best: float, page_size: int = 0, **more: object
) -> BatchCase:
    """q, k and v of e4m3. best: the fastest peer's time over ours that is wanted."""
    op, api = ("append", "paged") if page_size else ("ragged", "ragged")
    options: dict[str, object] = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
    options |= {"causal": True, "checked": 2, "goals": (("best", best),)}
    name, groups = f"{op}_{label}_8bit", ((count, rows, keys),)
    return BatchCase(name, op, api, groups, page_size, **(options | more))  # type: ignore[arg-type]


_LATENT: dict[str, object] = {"num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512}
_LATENT |= {"num_qo_heads": 16}
_HOST_PAGES = {"ragged": 0, "mla": 64}


def _host(api: str, group: tuple[int, int, int], **more: object) -> dict[str, object]:
    """What host cases of an API share."""
    page_size = _HOST_PAGES.get(api, 16)
    options = {"causal": api != "decode", "page_size": page_size, "requests": (group,)} | more
    return options | (_LATENT if api == "mla" else {})


def _host_plan(api: str, count: int, arrays: str) -> BatchCase:
    """1,024 keys a request; a row a request of decode and latent attention, or 16 new rows."""
    group = (count, 1 if api in ("decode", "mla") else 16, 1024)
    return _host_plan_of(f"{api}_{count}", api, arrays, group)


def _host_plan_of(label: str, api: str, arrays: str, *groups: tuple[int, int, int]) -> BatchCase:
    """plan() for lengths that change at every call, around these (steps.py)."""
    goals = ((_FA2, 1.5 if arrays == "device" else 1.0),)
    return BatchCase(
        f"plan_{label}_{arrays}", "host_batch", api, timed="plan", arrays=arrays,
        **_host(api, groups[0], goals=goals, requests=groups),
    )  # type: ignore[arg-type]  # fmt: skip


def _host_run(api: str, framework: str, out: bool) -> BatchCase:
    group = (8, 1 if api in ("decode", "mla") else 16, 128)
    goal = 12.0 if api == "mla" else 10.0 if out else 14.0
    return BatchCase(
        f"run_{api}_{framework}_{'out' if out else 'alloc'}", "host_batch", api,
        framework=framework, out=out, **_host(api, group, host_goal_us=goal),
    )  # type: ignore[arg-type]  # fmt: skip


_WIDE_64 = {"num_qo_heads": 64, "head_dim_qk": 64, "head_dim_vo": 64}
_WIDE_256 = {"num_qo_heads": 16, "num_kv_heads": 4, "head_dim_qk": 256, "head_dim_vo": 256}

BATCH_CASES: tuple[BatchCase, ...] = (
    _decode("64x8k", (64, 8192)),
    _decode("256x2k", (256, 2048)),
    _decode("64x8k_p1", (64, 8192), page_size=1),
    _decode("64x8k_p64", (64, 8192), page_size=64),
    _decode("8x8k", (8, 8192)),
    _decode("64x1k", (64, 1024)),
    _decode("1x128k", (1, 131072)),
    _decode("skew", (1, 131072), (63, 512)),
    _decode("64x8k_fp8", (64, 8192), kv_dtype="float8_e4m3fn", goals=((_FA2, 1.3),)),
    _decode("64x4k_mha", (64, 4096), num_kv_heads=32),
    _decode("64x8k_h64_d64", (64, 8192), **_WIDE_64),
    _decode("64x32k_w1023", (64, 32768), window_left=1023, against="decode_64x1k"),
    _append("8x512_8k", 8, 512, 8192),
    _append("1x2k_32k", 1, 2048, 32768),
    _append("64x8_4k", 64, 8, 4096, goals=((_FA3, 1.0),)),
    _append("8x512_8k_p64", 8, 512, 8192, 64),
    _append("8x512_8k_p1", 8, 512, 8192, 1, goals=((_FA3, 1.0), (_FLASHINFER_FA3, 1.0))),
    _verify(1),
    _verify(4),
    _verify(8),
    _verify(4, "tree"),
    _verify(8, "tree"),
    _ragged("4x4k", (4, 4096), goals=((_FA2, 1.0), (_FA3, 0.97))),
    _ragged("zipf_16k", *((1, length) for length in zipf_lengths(16, 16384)),
            goals=((_FA2, 1.0), (_FA3, 1.0))),
    _ragged("16x1k", (16, 1024), goals=((_FA2, 1.0), (_FA3, 1.0))),
    _ragged("32x512", (32, 512), goals=((_FA2, 1.0), (_FA3, 1.05))),
    _option("mask_bits", (_FA2, 4.0), causal=False, mask="packed", against="ragged_4x4k"),
    _option("alibi", (_FA2, 2.0), pos_encoding_mode="ALIBI", against="ragged_4x4k"),
    _option("rope", (_FA2, 1.4), pos_encoding_mode="ROPE_LLAMA", against="ragged_4x4k"),
    _option("softcap", (_FA2, 1.0), logits_soft_cap=30.0, against="ragged_4x4k"),
    _option("window1023", (_FA2, 1.0), (_FA3, 0.97), window_left=1023),
    _option("d256", (_FA2, 0.95), (_FA3, 0.93), **_WIDE_256),
    _option("d64", (_FA2, 0.95), (_FA3, 0.95), head_dim_qk=64, head_dim_vo=64),
    _ragged("10x384_encoder", (10, 384), causal=False, num_qo_heads=12, num_kv_heads=12,
            head_dim_qk=64, head_dim_vo=64, goals=(("best", 0.92),)),
    _cascade("64x8k_256", 64, 8192, 256, ("flashinfer_fa2:multilevel", 4.0), (_APART, 1.0)),
    _cascade("256x32k_256", 256, 32768, 256, ("flashinfer_fa2:multilevel", 2.5), (_APART, 1.0)),
    _cascade("16x2k_512", 16, 2048, 512, ("flashinfer_fa2:flat", 1.0)),
    _cascade("8x4k_128_h8_1", 8, 4096, 128, (_APART, 0.98), num_qo_heads=8, num_kv_heads=1),
    BatchCase(
        "mixed_1x2k_8k_63x1_4k", "mixed", "mixed", ((1, 2048, 8192), (63, 1, 4096)), causal=True,
        goals=((_APART, 1 / 0.92), ("flashinfer_fa2:holistic", 1.0), (_FA3, 1.0)),
    ),
    _mla("128x4k_h128", (128, 1, 4096), num_qo_heads=128, best=1.0),
    _mla("32x8k_h16", (32, 1, 8192), num_qo_heads=16, best=1.08),
    _mla("64x8k_h16_p1", (64, 1, 8192), num_qo_heads=16, page_size=1, best=1.0),
    _mla("1x32k_h128", (1, 1, 32768), num_qo_heads=128, best=1.1),
    _mla("64x8k_h8", (64, 1, 8192), num_qo_heads=8, best=1.15),
    _mla("8x8k_h16", (8, 1, 8192), num_qo_heads=16, best=1.15),
    _mla("skew_h16", (1, 1, 4641), (1, 1, 45118), (1, 1, 1730), (1, 1, 1696), num_qo_heads=16,
         best=1.2),
    _mla("32x8k_h16_q2", (32, 2, 8192), num_qo_heads=16, against="mla_32x8k_h16",
         against_goal=1 / 1.05),
    _mla("32x8k_h16_q4", (32, 4, 8192), num_qo_heads=16, against="mla_32x8k_h16",
         against_goal=1 / 1.12),
    _mla("64x8k_h16", (64, 1, 8192), num_qo_heads=16),
    _mla("64x8k_h16_fp8", (64, 1, 8192), num_qo_heads=16, kv_dtype="float8_e4m3fn",
         against="mla_64x8k_h16", against_goal=1.5),
    _mla("128x4k_h128_fp8", (128, 1, 4096), num_qo_heads=128, kv_dtype="float8_e4m3fn",
         against="mla_128x4k_h128", against_goal=0.95),
    _mla("32x8k_h16_portable", (32, 1, 8192), num_qo_heads=16, is_portable=True, best=1.0),
    _sparse("sparse_8_h16", 8, num_qo_heads=16),
    _sparse("sparse_256_h128", 256, num_qo_heads=128),
    _decode("64x4k_d512", (64, 4096), num_qo_heads=8, num_kv_heads=1, head_dim_qk=512,
            head_dim_vo=512, goals=(("best", 1.0),)),
    _ragged("4x4k_d512", (4, 4096), num_qo_heads=8, num_kv_heads=2, head_dim_qk=512,
            head_dim_vo=512, goals=(("best", 1.0),)),
    _eight_bits("1x16k", 1, 16384, 16384, 1.2),
    _eight_bits("1x16k_full", 1, 16384, 16384, 1.25, causal=False),
    _eight_bits("4x4k", 4, 4096, 4096, 1.2),
    _eight_bits("16x1k", 16, 1024, 1024, 1.1),
    _eight_bits("8x512_8k", 8, 512, 8192, 1.15, 16),
    _eight_bits("8x512_8k_p64", 8, 512, 8192, 1.15, 64),
    _eight_bits("1x16k_d64", 1, 16384, 16384, 1.1, head_dim_qk=64, head_dim_vo=64),
    _eight_bits("4x4k_d256", 4, 4096, 4096, 1.1, **_WIDE_256),
    *(_host_plan("decode", count, arrays)
      for count in (1, 64, 256, 1024) for arrays in ("numpy", "torch_cpu", "device")),
    *(_host_plan(api, 256, arrays)
      for api in ("paged", "ragged") for arrays in ("numpy", "torch_cpu", "device")),
    *(_host_plan_of(f"prompts_{count}", "paged", arrays, (count, rows, keys))
      for count, rows, keys in ((8, 512, 2048), (32, 256, 1024))
      for arrays in ("numpy", "torch_cpu", "device")),
    *(_host_plan_of("mixed_64_2", "paged", arrays, (2, 512, 1024), (64, 1, 1024))
      for arrays in ("numpy", "torch_cpu", "device")),
    _host_plan("mla", 128, "torch_cpu"),
    *(_host_plan("decode", count, "device") for count in (16, 128)),
    *(_host_plan(api, count, "device") for api in ("paged", "mla") for count in (1, 16, 128)),
    *(_host_run(api, framework, out)
      for api in ("decode", "paged", "ragged") for framework in ("torch", "cupy")
      for out in (True, False)),
    *(_host_run("mla", "torch", out) for out in (True, False)),
)  # fmt: skip
