"""The attention kernels on the host, every access checked, against the reference.

One parameter of a test is one kernel or a few: kernels are built once and kept, and a case takes a
fraction of a second.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import compare, gpu_cases
from helpers.batch_cases import Problem
from helpers.cases import Case
from helpers.gpu_cases import CLASSES, apply
from helpers.page_cases import Append, AppendCase
from helpers.share import one_of, slow_unless

import cupyattn
from cupyattn.jit import kernels_dir

from . import gpu, run

SMALL = replace(gpu_cases.PLAIN, qo_len=70, kv_len=150, head_dim_qk=64, head_dim_vo=64)
SHAPES: dict[str, dict[str, Any]] = {
    "prefill": {},
    "few rows": {"qo_len": 9},
    "decode": {"qo_len": 3, "group": 4},
    "split prefill": {"qo_len": 20, "num_kv_heads": 1, "kv_len": 1600},
    "split decode": {"qo_len": 2, "num_kv_heads": 1, "kv_len": 1900},
}


def check(case: Case, **facts: Any) -> run.Answer:
    answer = run.single(case, **facts)
    answer.check()
    return answer


# --- every option alone ---


def _is_ordinary(name: str) -> bool:
    """Many rows and one of each option, and few, whose kernel is that of many, of some. Of head
    dims, each of which is a kernel, many rows and one by turns."""
    changes = list(dict.fromkeys(x.rpartition(", ")[0] for x in gpu_cases.ALONE))
    change, _, shape = name.rpartition(", ")
    place = changes.index(change)
    if change.startswith("dim"):
        return shape == ("prefill", "one row")[place % 2]
    return shape != "append" or place % 3 == 0


@pytest.mark.parametrize("name", slow_unless(_is_ordinary, gpu_cases.ALONE))
def test_every_option_alone(name: str) -> None:
    check(run.small(gpu_cases.ALONE[name]))


@pytest.mark.parametrize("name", ["e4m3 cache, prefill", "e4m3 cache, one row"])
def test_fp8_without_the_instruction(name: str) -> None:
    """Before sm_89 e4m3 is converted by shifts."""
    check(run.small(gpu_cases.ALONE[name]), arch=800)


@pytest.mark.parametrize("shape", ["split prefill", "split decode"])
def test_fp8_outputs_of_merges(shape: str) -> None:
    case = replace(SMALL, **SHAPES[shape], o_dtype="float8_e5m2", strides=("unaligned",) * 4)
    check(case, num_sms=12)


def test_fp8_outputs_are_saturated() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((n, 2, 64)).astype(np.float16) for n in (9, 30, 30))
    v[:, 1] = np.nan
    given = {"v_scale": 1e9, "o_dtype": "float8_e4m3fn"}
    with gpu.plugged_in():
        got = cupyattn.single_prefill_with_kv_cache(q, k, v, **given)
    wanted = cupyattn.single_prefill_with_kv_cache(q, k, v, **given)
    for out in (got, wanted):
        finite = out[:, 0].astype(np.float32)
        assert (abs(finite) == 448).all() and np.isnan(out[:, 1].astype(np.float32)).all()
    np.testing.assert_array_equal(got[:, 0], wanted[:, 0])


# --- random combinations: a few kernels each, many calls ---


def _of_class(chosen: Problem, seed: int) -> Case:
    from helpers import cases

    case = run.small(apply(chosen, cases.random_case(10_000 + seed)), 70, 200)
    # Decode, a few rows and many: each class sees all three.
    rows = (3, 12, 70)[seed % 3]
    return replace(case, qo_len=min(case.qo_len, rows), group=min(case.group, 8))


# Every twelfth class has many calls in the ordinary suite; the slow one has all, with fewer calls.
FEW = CLASSES[6::12]
PER_CLASS = 14


@pytest.mark.parametrize("index", range(len(FEW)))
def test_random_options_of_few_kernels(index: int) -> None:
    for seed in range(PER_CLASS * index, PER_CLASS * (index + 1)):
        check(_of_class(FEW[index], seed), seed=seed % 4, num_sms=12)


def test_there_are_enough_random_combinations() -> None:
    assert len(FEW) * PER_CLASS >= 70
    dims = {dim for chosen in FEW for dim in chosen.dims}
    assert {64, 80, 128, 192, 256} <= dims  # the others are among the options alone


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CLASSES)))
def test_random_options_of_every_kernel(index: int) -> None:
    for seed in range(6 * index, 6 * index + 6):
        check(_of_class(CLASSES[index], 1_000_000 + seed), seed=seed % 4, num_sms=12)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, gpu_cases.NUM_FREE, 10))
def test_random_everything(first: int) -> None:
    for seed in range(first, first + 10):
        case = run.small(gpu_cases.free(seed), 70, 200)
        check(replace(case, group=min(case.group, 8)), seed=seed % 3, num_sms=12)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_decode(first: int) -> None:
    for seed in range(first, first + 10):
        case = gpu_cases.decode(seed)
        answer = run.single(run.small(case, 1, 400), is_decode=True, seed=seed % 3, num_sms=40)
        answer.check()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_splits(first: int) -> None:
    for seed in range(first, first + 10):
        case = gpu_cases.split(seed)
        check(replace(case, kv_len=case.kv_len // 6), seed=seed % 3, num_sms=24)


# --- lengths: 0, 1 and the edges of tiles ---


@pytest.mark.parametrize("qo_lens", one_of(2, [(1, 17, 65), (64,)]), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_the_edges_of_tiles(causal: bool, qo_lens: tuple[int, ...]) -> None:
    edges = (0, 1, 15, 16, 17, 63, 64, 65, 128, 129)
    for qo_len, kv_len in itertools.product(qo_lens, edges):
        check(replace(SMALL, num_kv_heads=1, group=2, qo_len=qo_len, kv_len=kv_len, causal=causal))


@pytest.mark.parametrize(
    "windows", one_of(2, [(0, 1, 16, 47, 63, 64, 127, 1000), (15, 48, 65, 128)]), ids=str
)
def test_windows_around_the_edges_of_tiles(windows: tuple[int, ...]) -> None:
    for window in windows:
        for qo_len in (2, 33):
            case = replace(SMALL, num_kv_heads=1, group=2, qo_len=qo_len, window_left=window)
            check(replace(case, causal=window % 2 == 0))
            check(replace(case, window_left=-1, window_right=window))
            check(replace(case, window_right=129 - min(window, 129)))


# --- splits ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["split prefill", "split decode"])
def test_splits_are_made_and_merged(shape: str, causal: bool) -> None:
    case = replace(SMALL, **SHAPES[shape], causal=causal, has_sinks=causal)
    for num_sms in (6, 16):
        facts = {"blocks_per_sm": 2, "is_portable": shape == "split decode"}
        answer = check(case, num_sms=num_sms, **facts)
        names = [launch.name for launch in answer.launches]
        is_persistent = names == ["prefill_sm90", "merge_splits"]
        assert is_persistent or answer.launches[0].grid[2] > 1
        assert ("merge_splits" in names) == (shape == "split prefill")


# --- the order in which threads and blocks run ---


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_of_threads_changes_no_bit(shape: str) -> None:
    case = replace(SMALL, **SHAPES[shape], causal=True)
    first = check(case, num_sms=16)
    for seed in (1, 2, 3):
        again = run.single(case, num_sms=16, seed=seed)
        for a, b in zip(first.bits(), again.bits(), strict=True):
            compare.assert_bitwise_equal(a, b, f"{shape}, seed {seed}")


# --- values that are no numbers: where a row sees them, and nowhere else ---

_HIDING: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_left": 20},
    "mask": {"mask_kind": "packed"},
}


@pytest.mark.parametrize(("which", "value"), [("v", np.nan), ("v", np.inf), ("k", np.nan)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hiding", _HIDING)
def test_hidden_values_do_not_contaminate(
    hiding: str, shape: str, which: str, value: float
) -> None:
    # With logits this small no probability underflows, so an infinity that is seen stays one.
    case = replace(SMALL, sm_scale=0.05, **{**_HIDING[hiding], **SHAPES[shape]})
    offset = case.kv_len - case.qo_len
    places = {
        "causal": (case.kv_len - 1, case.kv_len - case.qo_len // 2),
        "window": (0, 64, offset - 20),
        "mask": (case.kv_len // 2, 17),
    }[hiding]
    changes = [(place, value) for place in sorted(set(places))]
    answer = run.single(case, spoil={which: changes}, num_sms=16)
    answer.check()


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.parametrize("shape", ["prefill", "decode"])
def test_hidden_values_of_other_dtypes(shape: str, kv_dtype: str) -> None:
    dtype = "float16" if kv_dtype == "float16" else "bfloat16"
    case = replace(SMALL, dtype=dtype, kv_dtype=kv_dtype, sm_scale=0.05, causal=True)
    case = replace(case, **SHAPES[shape])
    last = case.kv_len - 1
    run.single(case, spoil={"v": [((last, 0, 3), np.nan), ((last, 1, 62), np.nan)]}).check()


# --- how good it is ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_largest_probability_of_a_decode_is_not_rounded(dtype: str) -> None:
    check_largest_probability(decode_of(dtype), is_portable=True)


def decode_of(dtype: str) -> Case:
    return replace(SMALL, **SHAPES["decode"], dtype=dtype, kv_dtype=dtype, kv_len=900)


def check_largest_probability(
    case: Case, *, key: int = 850, logits: tuple[float, float] = (1.5, 5.4), **facts: Any
) -> None:
    """Where all values but one key's are zero, answers must be the nearest there are. Logits are
    zero, and that key's more."""
    others = np.arange(case.kv_len) != key
    for logit in np.linspace(*logits, 14).astype(np.float16):
        spoil = {
            "q": [(..., 0.0), ((..., 0), 8.0)],
            "k": [(..., 0.0), ((~others, slice(None), 0), logit)],
            "v": [(others, 0.0)],
        }
        answer = run.single(replace(case, sm_scale=0.125), spoil=spoil, num_sms=1, **facts)
        call = answer.call
        top = np.exp(float(call.inputs["k"][key, 0, 0]))
        value = np.repeat(call.inputs["v"][key].astype(np.float64), case.group, axis=0)
        expected = np.broadcast_to(value * (top / (top + others.sum())), call.inputs["q"].shape)
        got = call.answers()[0]
        error = np.abs(got.astype(np.float64) - expected)
        assert (error <= 0.501 * compare.ulp(got.dtype, np.abs(expected))).all()


# --- what it takes ---


@pytest.mark.slow
def test_a_causal_prefill_takes_little() -> None:
    """Two heads, 256 x 256, D 64: 0.02 s on a desk; half a second is what a suite can bear."""
    case = replace(SMALL, qo_len=256, kv_len=256, num_kv_heads=2, group=1, causal=True)
    assert min(run.single(case, mode="plain").seconds for _ in range(3)) <= 0.5


# --- the other kernels, and that there are no more ---


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits(bitorder: str) -> None:
    rng = np.random.default_rng(0)
    with gpu.plugged_in():
        for count in (0, 1, 7, 8, 9, 255, 2049):
            bits = rng.random(count) < 0.5
            packed = cupyattn.packbits(bits, bitorder)
            np.testing.assert_array_equal(packed, np.packbits(bits, bitorder=bitorder))
            cuts = np.sort(rng.integers(0, count + 1, 9)).astype(np.int32)
            parts, new = cupyattn.segment_packbits(bits, cuts, bitorder)
            pieces = [
                np.packbits(bits[a:b], bitorder=bitorder) for a, b in itertools.pairwise(cuts)
            ]
            np.testing.assert_array_equal(parts, np.concatenate(pieces))
            assert new.tolist() == [0, *np.cumsum([len(piece) for piece in pieces])]


# Entry files that tests of their own run.
TESTED_ELSEWHERE = {
    "mixed_sm80": "test_cascade.py",
    "merge_levels": "test_cascade.py",
    "merge_states": "test_merge.py",
    "pad_lse": "test_mutations.py",
    "plan_batch": "test_plan_batch.py",
    "read_tables": "test_read_tables.py",
    "append_new_kv": "test_flash_attn.py",
    "find_mean": "test_quantize.py",
    "quantize": "test_quantize.py",
    "store_kv": "test_page.py",
    "copy_rows": "test_flash_attn.py",
    "widen_rows": "test_widened_queries.py",
    "widen_pages": "test_key_unions.py",
    "select_scores": "test_select.py",
    "select_softmax": "test_select.py",
    "select_topk": "test_select.py",
    "serving_metadata": "test_serving.py",
    "exchange_states": "test_exchange.py",
    "gather_heads": "test_exchange.py",
    "gather_keys": "test_listed_latent.py",
    "list_slots": "test_latent_blocks.py",
    "share_indices": "test_page.py",
    "union_lists": "test_key_unions.py",
    "wide_sm80": "test_wide.py",
    "wide_decode_sm90": "test_wide_sm90.py",
    "wide_sm90": "test_wide_sm90.py",
}


def test_every_entry_file_runs() -> None:
    seen = set()
    rope = {"pos_encoding_mode": "ROPE_LLAMA"}
    split, decode = SHAPES["split prefill"], {"qo_len": 1, "group": 4}
    portable = {"qo_len": 40, "group": 1, "strides": ("unaligned",) * 4}
    for changes in ({"mask_kind": "bool"}, rope, split, decode, portable):
        answer = check(replace(SMALL, **changes), num_sms=16)
        seen |= {launch.name for launch in answer.launches}
    with gpu.plugged_in() as emulated:
        append = Append(AppendCase(), np)
        append.run()
        lengths = cupyattn.get_seq_lens(*(np.array(x, np.int32) for x in ([0, 2], [3])), 4)
        cupyattn.get_batch_indices_positions(np.array([0, 5], np.int32), lengths, 5)
        seen |= {launch.name for launch in emulated.launches}
    here = Path(__file__).parent
    for name, module in TESTED_ELSEWHERE.items():
        assert name in (here / module).read_text(), f"{module} no longer runs {name}"
    entries = {path.stem for path in (kernels_dir() / "entry").glob("*.cu")}
    assert seen | TESTED_ELSEWHERE.keys() == entries
