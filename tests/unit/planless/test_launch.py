"""What calls without a plan launch, on a GPU that is not there, and which calls are cached."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers import fake_gpu
from helpers.fake_gpu import STREAM, Gpu, Launched, count_functions, pointer, unpack

import cupyattn
from cupyattn.engine import run_planless as call
from cupyattn.errors import ArgumentError, CupyAttnError, UnsupportedError, WorkspaceError
from cupyattn.launch.attention import find_items, plan_batch
from cupyattn.launch.driver import scratch
from cupyattn.launch.ops import packbits
from cupyattn.schedule import Masking
from cupyattn.schedule.capacity import plan_capacity
from cupyattn.schedule.tile_shape import TileShape

B, HQ, HKV, D, PAGES, PAGE, WIDTH = 5, 8, 2, 64, 30, 16, 9
PLANNER = plan_batch.PARAMS.size
Make = Callable[..., Any]


def no_checks(*_: object) -> None:
    raise AssertionError("the call was not cached")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks do not find their items."""
    monkeypatch.setattr(find_items, "prepare", lambda *_: None)


class Calls:
    """The arrays of calls that look alike: different ones for each `seed`."""

    def __init__(self, make: Make, entry: str, **changes: Any) -> None:
        self.make, self.entry, self.changes = make, entry, changes
        self.space = make(1 << 24, dtype="uint8")

    def arguments(self, count: int = B, width: int = WIDTH, rows: int = B) -> dict[str, Any]:
        make = self.make
        table, lens = make(count, width, dtype="int32"), make(count, dtype="int32")
        if self.entry.startswith("cudnn"):
            k, v = make(PAGES, HKV, PAGE, D), make(PAGES, HKV, PAGE, D)
            named = {"q": make(rows, HQ, D), "k_cache": k, "v_cache": v, "scale": 0.1}
            named |= {"workspace_buffer": self.space, "block_tables": table}
            named |= {"max_sequence_kv": 100, "actual_seq_lens_kv": lens, "out": make(rows, HQ, D)}
            if "prefill" in self.entry:
                named |= {"max_token_per_sequence": 3, "causal": True, "return_lse": True}
                named |= {"actual_seq_lens_q": make(count, dtype="int32")}
                named |= {"batch_offsets_q": make(count + 1, dtype="int32")}
        elif self.entry == "xqa":
            k, v = make(PAGES, PAGE, HKV, D), make(PAGES, PAGE, HKV, D)
            named = {"q": make(rows, 1, HQ, D), "k_cache": k, "v_cache": v, "page_table": table}
            named |= {"seq_lens": lens, "output": make(rows, 1, HQ, D)}
            named |= {"workspace_buffer": self.space}
        elif "ragged" in self.entry or "fmha" in self.entry:
            named = {"workspace_buffer": self.space, "seq_lens": lens, "max_q_len": 4}
            named |= {"max_kv_len": 99, "bmm1_scale": 0.1, "bmm2_scale": 2.0, "batch_size": count}
            named |= {f"cum_seq_lens_{x}": make(count + 1, dtype="int32") for x in ("q", "kv")}
            named |= {"out": make(rows, HQ, D), "return_lse": False}
            if "fmha" in self.entry:
                named |= {"qkv": make(rows, 3, HQ, D), "input_layout": "PACKED_QKV"}
            else:
                names = {"query": HQ, "key": HKV, "value": HKV}
                named |= {name: make(rows, heads, D) for name, heads in names.items()}
                named |= {"o_sf_scale": 1.0, "window_left": -1, "enable_pdl": None}
                named |= {"is_causal": True}
        else:
            named = {"query": make(rows, HQ, D), "kv_cache": make(PAGES, 2, HKV, PAGE, D)}
            named |= {"workspace_buffer": self.space, "block_tables": table, "seq_lens": lens}
            named |= {"bmm1_scale": 0.1, "out": make(rows, HQ, D), "kv_layout": "HND"}
            if "context" in self.entry:
                named |= {"max_q_len": 4, "max_kv_len": 99, "batch_size": count, "bmm2_scale": 2.0}
                named |= {"cum_seq_lens_q": make(count + 1, dtype="int32"), "cum_seq_lens_kv": None}
            else:
                named["max_seq_len"] = 100
        return named | {name: x(make) if callable(x) else x for name, x in self.changes.items()}

    def __call__(self, arguments: dict[str, Any]) -> Any:
        return getattr(cupyattn, self.entry)(**arguments)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("trtllm_batch_decode_with_kv_cache", {}),
    "decode, pair": (
        "trtllm_batch_decode_with_kv_cache",
        {"kv_cache": lambda make: (make(PAGES, HKV, PAGE, D), make(PAGES, HKV, PAGE, D))},
    ),
    "decode, array scales": (
        "trtllm_batch_decode_with_kv_cache",
        {
            "bmm1_scale": lambda make: make(1, dtype="float32"),
            "bmm2_scale": lambda make: make(1, dtype="float32"),
        },
    ),
    "decode, sinks, window, lse": (
        "trtllm_batch_decode_with_kv_cache",
        {
            "sinks": lambda make: make(HQ, dtype="float32"),
            "lse": lambda make: make(B, HQ, dtype="float32"),
            "window_left": 7,
            "return_lse": True,
        },
    ),
    "decode, one array for both": (
        "trtllm_batch_decode_with_kv_cache",
        {"kv_cache": lambda make: make(PAGES, 1, HKV, PAGE, D)},
    ),
    "decode, mask": (
        "trtllm_batch_decode_with_kv_cache",
        {
            "query": lambda make: make(2 * B, HQ, D),
            "out": lambda make: make(2 * B, HQ, D),
            "q_len_per_req": 2,
            "mask": lambda make: make(B, 2, dtype="uint8"),
        },
    ),
    "xqa decode": ("xqa_batch_decode_with_kv_cache", {}),
    "context": ("trtllm_batch_context_with_kv_cache", {}),
    "ragged rows": ("trtllm_ragged_attention_deepseek", {}),
    "packed rows": ("trtllm_fmha_v2_prefill", {"logits_soft_cap_scale": 30.0}),
    "xqa": ("xqa", {}),
    "xqa, two of both": (
        "xqa",
        {
            "k_cache": lambda make: make(PAGES, 2, PAGE, HKV, D),
            "v_cache": lambda make: make(PAGES, 2, PAGE, HKV, D),
        },
    ),
    "xqa, fp8": (
        "xqa",
        {
            "k_cache": lambda make: make(PAGES, PAGE, HKV, D, dtype="float8_e4m3fn"),
            "v_cache": lambda make: make(PAGES, PAGE, HKV, D, dtype="float8_e4m3fn"),
            "kv_scale": lambda make: make(1, dtype="float32"),
        },
    ),
    "xqa, a scale without effect": ("xqa", {"kv_scale": lambda make: make(1, dtype="float32")}),
    "cudnn decode": ("cudnn_batch_decode_with_kv_cache", {}),
    "cudnn prefill": ("cudnn_batch_prefill_with_kv_cache", {}),
    "cudnn prefill, ragged": (
        "cudnn_batch_prefill_with_kv_cache",
        {
            "block_tables": None,
            "k_cache": lambda make: make(90, HKV, D),
            "v_cache": lambda make: make(90, HKV, D),
            "batch_offsets_k": lambda make: make(B, dtype="int32"),
            "batch_offsets_v": lambda make: make(B, dtype="int32"),
            "batch_offsets_units": "tokens",
            "lse": lambda make: make(B, 3, HQ, dtype="float32"),
        },
    ),
}


def facts(launch: Launched) -> tuple[Any, ...]:
    sizes = {"plan_batch": PLANNER, "pad_lse": PLANNER + 48}
    size = sizes.get(launch.kernel) if isinstance(launch.kernel, str) else None
    return launch.kernel, launch.grid, launch.block, launch.shared_bytes, launch.params[:size]


@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_of_equal_signature_are_cached(
    gpu: Gpu, make: Make, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, changes = VARIANTS[variant]
    if "fp8" in variant and not hasattr(make(1), "untyped_storage"):
        pytest.skip("CuPy has no fp8 of its own")
    calls = Calls(make, entry, **changes)
    calls(calls.arguments())
    later, each = [calls.arguments() for _ in range(3)], len(gpu.launches)
    gpu.launches.clear()
    monkeypatch.setattr(call, "check", no_checks)
    for arguments in later:
        answer = calls(arguments)
    cached = [facts(launch) for launch in gpu.launches]
    monkeypatch.undo()
    # undo() has also put back what makes the GPU.
    del answer
    assert len(cached) == 3 * each
    assert len({*cached}) == len(cached)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_calls_launch_the_same(
    gpu: Gpu, make: Make, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, changes = VARIANTS[variant]
    calls = Calls(make, entry, **changes)
    if "lse" not in changes:
        calls.changes = {**changes, "return_lse": False}
    calls(calls.arguments())
    arguments = calls.arguments()
    gpu.launches.clear()
    calls(arguments)
    cached = [facts(launch) for launch in gpu.launches]
    fake_gpu.forget()
    gpu.launches.clear()
    calls(arguments)
    assert cached == [facts(launch) for launch in gpu.launches]
    assert {launch.stream for launch in gpu.launches} == {STREAM}


SHAPES = ((5, 9, 5), (5, 9, 80), (64, 200, 64), (3, 1, 3), (130, 40, 3000), (1, 7, 1))
DECODES = ("decode", "decode, pair", "decode, array scales", "xqa", "xqa decode", "cudnn decode")


@pytest.mark.parametrize(
    "variant", [*DECODES, "context", "ragged rows", "packed rows", "cudnn prefill"]
)
def test_calls_of_other_lengths_are_cached(
    gpu: Gpu, make: Make, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's step has another number of rows, requests and pages than all before it."""
    entry, changes = VARIANTS[variant]
    calls = Calls(make, entry, **changes)
    # Decode has a row for each request; one row is served by another kernel than many.
    shapes = [(n, m, n if variant in DECODES else rows) for n, m, rows in SHAPES]
    given = [calls.arguments(*shape) for shape in shapes]
    for arguments in given:
        arguments["out" if "out" in arguments else "output"] = None
        if "return_lse" not in arguments and "xqa" not in entry:
            arguments["return_lse"] = True
    checked = []
    for arguments in given:
        fake_gpu.forget()
        gpu.launches.clear()
        calls(arguments)
        checked.append([facts_but_outputs(launch) for launch in gpu.launches])
    fake_gpu.forget()
    calls(given[1])
    monkeypatch.setattr(call, "check", no_checks)
    for _ in range(2):
        for arguments, expected in zip(given, checked, strict=True):
            gpu.launches.clear()
            answer = calls(arguments)
            assert [facts_but_outputs(launch) for launch in gpu.launches] == expected
            out = answer[0] if isinstance(answer, tuple) else answer
            rows = arguments.get("query", arguments.get("q", arguments.get("qkv")))
            assert out.shape[0] == rows.shape[0]
    monkeypatch.undo()


def facts_but_outputs(launch: Launched) -> tuple[Any, ...]:
    """facts() without addresses of what a call makes."""
    kernel, grid, block, shared_bytes, raw = facts(launch)
    if kernel == "pad_lse":
        return kernel, grid, block, raw[: PLANNER + 8], raw[PLANNER + 16 :]
    if kernel == "plan_batch":
        return kernel, grid, block, shared_bytes, raw
    known = unpack(raw)
    return kernel, grid, {name: known[name] for name in known if name not in ("o", "lse")}


def test_calls_that_do_not_fit_are_refused_after_good_ones(gpu: Gpu, make: Make) -> None:
    calls = Calls(make, "trtllm_batch_context_with_kv_cache")
    calls(calls.arguments(5, 9, 80))
    good, other = calls.arguments(6, 9, 80), calls.arguments(7, 9, 81)
    calls(good)
    gpu.launches.clear()
    for name, message in (
        ("seq_lens", "seq_lens: shape is"),
        ("cum_seq_lens_q", "cum_seq_lens_q: shape is"),
        ("block_tables", "batch_size: got 6; block_tables has 7"),
        ("out", "out: shape is"),
        ("batch_size", "batch_size: got 7"),
    ):
        with pytest.raises(ArgumentError, match=message):
            calls(good | {name: other[name]})
    small = {"workspace_buffer": calls.space[: 1 << 15]}
    calls(calls.arguments(3, 1, 80) | small)
    gpu.launches.clear()
    with pytest.raises(WorkspaceError, match="this call needs"):
        calls(calls.arguments(130, 40, 3000) | small)
    for rows in (80, 79):
        lse = make(rows, HQ, dtype="float32")
        if rows == 80:
            calls(good | {"lse": lse, "return_lse": True})
            gpu.launches.clear()
            continue
        with pytest.raises(ArgumentError, match="lse: shape"):
            calls(good | {"lse": lse, "return_lse": True})
    assert not gpu.launches


@pytest.mark.parametrize("variant", ["decode", "xqa", "context", "ragged rows", "cudnn decode"])
def test_more_requests_than_a_block_plans(gpu: Gpu, make: Make, variant: str) -> None:
    """They are planned and served in parts, in the same workspace."""
    entry, changes = VARIANTS[variant]
    calls = Calls(make, entry, **changes)
    count = 13_000
    rows = count if variant in DECODES else 80
    arguments = calls.arguments(count, 1, rows)
    for _ in range(2):
        gpu.launches.clear()
        calls(arguments)
        planners = [x for x in gpu.launches if x.kernel == "plan_batch"]
        attentions = gpu.attentions()
        assert len(planners) == len(attentions) == 2 == len(gpu.launches) // 2
        first, second = (unpack(x.params) for x in attentions)
        moved = {name for name in first if first[name] != second[name]}
        if variant in DECODES:
            assert moved == {"q", "o", "kv_indices"}
            size = 2 * HQ * D * count // 2
            assert second["q"] - first["q"] == second["o"] - first["o"] == size
            assert second["kv_indices"] - first["kv_indices"] == 4 * count // 2
        else:
            assert moved == ({"kv_indices"} if variant == "context" else set())
        lens = [struct.unpack_from("<4Q", x.params) for x in planners]
        assert all(b - a == 4 * count // 2 for a, b in zip(*lens, strict=True) if a)


@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_the_mask_of_more_requests_than_a_block_plans(gpu: Gpu, make: Make, dtype: str) -> None:
    """Bools become bits once, and each part has those of its own rows."""
    count = 13_001
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache", q_len_per_req=2)
    shape = (count, 2) if dtype == "uint8" else (count, 2, 2)
    arguments = calls.arguments(count, 1, 2 * count)
    arguments["mask"] = mask = make(*shape, dtype=dtype)
    for _ in range(2):
        gpu.launches.clear()
        calls(arguments)
        first, second = (unpack(x.params) for x in gpu.attentions())
        assert second["mask"] - first["mask"] == 2 * 6501
        assert (first["mask_bytes"], second["mask_bytes"]) == (2 * 6501, 2 * 6500)
        assert first["mask_row_bytes"] == second["mask_row_bytes"] == 1
        packs = [x for x in gpu.launches if x.kernel == "packbits"]
        assert len(packs) == (dtype == "bool")
        if dtype == "uint8":
            assert first["mask"] == pointer(mask)
        else:
            begin, end = pointer(calls.space), pointer(calls.space) + calls.space.nbytes
            assert begin < first["mask"] and first["mask"] + 2 * count <= end


def test_a_cached_call_runs_few_functions(gpu: Gpu, make: Make) -> None:
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache")
    arguments = calls.arguments()
    calls(arguments)
    assert count_functions(lambda: calls(arguments)) <= 30


def test_growing_requests_share_a_signature(
    gpu: Gpu, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache")
    arguments = calls.arguments()
    calls(arguments | {"max_seq_len": 70})
    known = len(call.CALLS)
    for longest in (71, 100, 128):
        calls(arguments | {"max_seq_len": longest})
    assert len(call.CALLS) == known
    calls(arguments | {"max_seq_len": 129})
    assert len(call.CALLS) == known + 1


def test_cached_calls_make_outputs(gpu: Gpu, make: Make) -> None:
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache", out=None, return_lse=True)
    for _ in range(2):
        arguments = calls.arguments()
        out, lse = calls(arguments)
        assert tuple(out.shape) == (B, HQ, D) and tuple(lse.shape) == (B, HQ)
        got = unpack(gpu.attentions()[-1].params)
        assert (got["o"], got["lse"]) == (pointer(out), pointer(lse))


def test_blocks_are_told_where_lengths_are(gpu: Gpu, make: Make) -> None:
    """Their counters are nobody's workspace, and zero before and after each launch."""
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache", max_seq_len=144)
    for _ in range(2):
        gpu.launches.clear()
        arguments = calls.arguments()
        calls(arguments)
        (attention,) = gpu.launches
        assert gpu.lengths() == (0, pointer(arguments["seq_lens"]), 0, 0)
        assert gpu.num_requests() == (B, B)
        got = unpack(attention.params)
        assert got["counters"] == fake_gpu.COUNTERS
        assert got["partial_o"] == pointer(calls.space) < got["partial_lse"]
        assert got["kv_indices"] == pointer(arguments["block_tables"])
        assert attention.kernel.finds_items
    # A lane of a warp has two; more are planned.
    gpu.launches.clear()
    calls(calls.arguments(64, 9, 64))
    assert [x.kernel.finds_items for x in gpu.launches] == [True]
    gpu.launches.clear()
    calls(calls.arguments(65, 9, 65))
    assert [x.kernel for x in gpu.launches[:-1]] == ["plan_batch"]
    assert not gpu.launches[-1].kernel.finds_items


@pytest.mark.usefixtures("planned")
def test_what_the_kernels_are_told(gpu: Gpu, make: Make) -> None:
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache", window_left=40)
    arguments = calls.arguments()
    calls(arguments)
    planner, attention = gpu.launches
    space = pointer(calls.space)
    pointers = struct.unpack_from("<12Q", planner.params)
    assert pointers[:8] == (0, pointer(arguments["seq_lens"]), 0, 0, 0, 0, 0, 0)
    assert (planner.kernel, planner.grid, planner.block) == ("plan_batch", (1, 1, 1), (512, 1, 1))
    got = unpack(attention.params)
    assert got["work"] == pointers[8] == space
    assert (got["merges"], got["counters"]) == pointers[9:11]
    assert got["kv_indices"] == pointer(arguments["block_tables"])
    cache = pointer(arguments["kv_cache"])
    assert (got["k"], got["v"]) == (cache, cache + 2 * HKV * PAGE * D)
    assert space < got["counters"] <= pointers[11] < got["partial_o"] <= got["partial_lse"]
    assert (got["window_left"], got["window_right"], got["page_size"]) == (40, -1, PAGE)
    assert attention.grid[0] == HKV and attention.kernel.name == "decode_sm80"


def test_what_is_made_for_one_call_is_not_cached(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted page tables have no address to keep."""
    make = fake_gpu.maker("torch", monkeypatch)
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache")
    arguments = calls.arguments() | {"block_tables": make(B, WIDTH, dtype="int64")}
    calls(arguments)
    assert unpack(gpu.launches[-1].params)["kv_indices"] != pointer(arguments["block_tables"])
    assert not len(call.CALLS)


@pytest.mark.usefixtures("planned")
def test_lengths_may_be_steps_of_offsets(gpu: Gpu, make: Make) -> None:
    """The planner takes the differences: nothing else is launched, and calls are cached."""
    ragged = {"k_cache": make(90, HKV, D), "v_cache": make(90, HKV, D), "block_tables": None}
    lengths = {"actual_seq_lens_kv": None, "actual_seq_lens_q": None, "return_lse": False}
    calls = Calls(make, "cudnn_batch_prefill_with_kv_cache")
    for units, of_token in (("elements", HKV * D), ("tokens", 1)):
        gpu.launches.clear()
        for _ in range(2):
            given = {"batch_offsets_k": make(B + 1, dtype="int32"), "batch_offsets_units": units}
            calls(calls.arguments() | ragged | lengths | given)
            planner, _ = gpu.launches[-2:]
            q_lens, k_lens, _, starts = struct.unpack_from("<4Q", planner.params)
            assert not q_lens and k_lens == starts == pointer(given["batch_offsets_k"])
            stride, kind, unit = struct.unpack_from("<q2i", planner.params, 96 + 16)
            assert (stride, kind, unit) == (1, 0, -of_token)
        assert len(gpu.launches) == 4
    assert len(call.CALLS) == 2


def test_a_mask_replaces_causality(gpu: Gpu, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are read where they are; bools are packed into the workspace, at every call."""
    packed: list[Any] = []
    monkeypatch.setattr(packbits, "launch", lambda *args, **_: packed.append(args[1]))
    entry, changes = VARIANTS["decode, mask"]
    calls = Calls(make, entry, **changes)
    for dtype, row_bytes in (("uint8", 1), ("int32", 4), ("bool", 1)):
        shape = (B, 2, 2) if dtype == "bool" else (B, 2)
        arguments = calls.arguments() | {"mask": make(*shape, dtype=dtype)}
        for _ in range(2):
            packed.clear()
            calls(arguments)
            got = unpack(gpu.launches[-1].params)
            assert (got["window_right"], got["mask_row_bytes"]) == (-1, row_bytes)
            assert got["mask_bytes"] == 2 * B * row_bytes
            if dtype == "bool":
                assert [x.ptr for x in packed] == [got["mask"]]
                assert got["mask"] >= pointer(calls.space) and got["mask"] >= got["partial_lse"]
            else:
                assert not packed and got["mask"] == pointer(arguments["mask"])


# --- bad calls, after good ones ---

BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "out: overlaps query": lambda a: {"out": a["query"]},
    "out: overlaps kv_cache": lambda a: {
        "out": a["kv_cache"].reshape(-1)[: B * HQ * D].reshape(B, HQ, D)
    },
    "out: overlaps kv_cache in memory": lambda a: {
        "out": a["kv_cache"].reshape(-1)[-B * HQ * D :].reshape(B, HQ, D)
    },
    "seq_lens: shape is": lambda a: {"seq_lens": a["seq_lens"][:3]},
    "block_tables: shape": lambda a: {"block_tables": a["block_tables"][0]},
    "query: holds": lambda a: {"query": a["query"][:3]},
    "query: got list": lambda a: {"query": [1.0]},
    "seq_lens: got list": lambda a: {"seq_lens": [1] * B},
    "workspace_buffer: this call needs": lambda a: {"workspace_buffer": a["workspace_buffer"][:64]},
    "workspace_buffer: its address": lambda a: {"workspace_buffer": a["workspace_buffer"][8:]},
    "window_left": lambda a: {"window_left": -2},
    "bmm2_scale: got True": lambda a: {"bmm2_scale": True},
    "q_len_per_req: got True": lambda a: {"q_len_per_req": True},
    "return_lse: got 'False'": lambda a: {"return_lse": "False"},
    "o_sf_scale": lambda a: {"o_sf_scale": a["seq_lens"]},
    "unknown dtype": lambda a: {"out_dtype": {}},
    "max_seq_len: got": lambda a: {"max_seq_len": a["seq_lens"]},
}


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("message", BAD)
def test_a_bad_call_is_refused_after_good_ones(gpu: Gpu, make: Make, message: str) -> None:
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache")
    arguments = calls.arguments()
    for _ in range(2):
        calls(arguments)
    gpu.launches.clear()
    with pytest.raises(CupyAttnError) as caught:
        calls(arguments | BAD[message](arguments))
    assert message in str(caught.value) and not gpu.launches


def test_a_workspace_that_holds_other_arrays(gpu: Gpu, make: Make) -> None:
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache")
    arguments = calls.arguments()
    calls(arguments)
    for name in ("out", "block_tables", "query"):
        held = arguments[name]
        size = held.nbytes if hasattr(held, "nbytes") else held.numel() * held.element_size()
        inside = calls.space[1024 : 1024 + size].view(held.dtype).reshape(held.shape)
        with pytest.raises(ArgumentError, match="overlaps"):
            calls(arguments | {name: inside})


@pytest.mark.usefixtures("planned")
def test_a_workspace_that_is_too_small(gpu: Gpu, make: Make) -> None:
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache", max_seq_len=144)
    calls.space = make(4096, dtype="uint8")
    with pytest.raises(WorkspaceError, match=r"needs \d+ bytes and it has 4096") as caught:
        calls(calls.arguments())
    need = int(str(caught.value).split(" needs ")[1].split()[0])
    calls.space = make(need, dtype="uint8")
    calls(calls.arguments())
    assert len(gpu.launches) == 2


@pytest.mark.usefixtures("planned")
def test_no_workspace_is_memory_of_the_thread_on_its_stream(
    gpu: Gpu, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(make, "xqa", workspace_buffer=None)

    def planned_at() -> list[int]:
        """Where work lists of two calls are."""
        gpu.launches.clear()
        for _ in range(2):
            calls(calls.arguments())
        planners = [x for x in gpu.launches if x.kernel == "plan_batch"]
        return [struct.unpack_from("<Q", x.params, 64)[0] for x in planners]

    calls(calls.arguments())  # is checked, and has memory for itself
    gpu.scratch.clear()
    first, second = planned_at()
    assert first == second and len(gpu.scratch) == 1

    # Another thread's launches lie between this one's, on the same stream.
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(planned_at()))
    thread.start()
    thread.join()
    assert found[0] == found[1] != first and len(gpu.scratch) == 2

    # A graph has memory of its own for each call, and so has a call that takes much.
    gpu.is_capturing = True
    planned_at()
    assert len(gpu.scratch) == 4
    gpu.is_capturing = False
    monkeypatch.setattr(scratch, "_MAX_KEPT_BYTES", 1)
    planned_at()
    assert len(gpu.scratch) == 6


def test_memory_is_kept_for_few_streams_and_as_much_as_a_call_took(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def allocate(num_bytes: int, *_: int) -> tuple[int, object]:
        made.append(num_bytes)
        return len(made), None

    monkeypatch.setattr(scratch, "_allocate_on", allocate)

    def workspace(num_bytes: int, stream: int = 0, device: int = 0) -> int:
        return scratch.workspace(num_bytes, device, stream, allocate)[0]

    assert [workspace(n) for n in (10, 8, 10, 11, 5)] == [1, 1, 1, 2, 2]
    assert workspace(5, device=1) == 3 and workspace(5) == 2 and workspace(5, device=1) == 3
    for stream in range(1, 100):
        assert workspace(5, stream) == workspace(5, stream)
        assert len(scratch._kept.workspaces) <= 16
    assert made[:3] == [10, 11, 5]


def test_lengths_on_the_host_are_cudnns(gpu: Gpu, make: Make) -> None:
    import numpy as np

    lens = np.zeros(B, np.int32)
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache", seq_lens=lens)
    with pytest.raises(ArgumentError, match="seq_lens: is on cpu"):
        calls(calls.arguments())


def test_fp8_queries_need_keys_of_their_dtype(gpu: Gpu, make: Make) -> None:
    if not hasattr(make(1), "untyped_storage"):
        pytest.skip("CuPy has no fp8 of its own")
    calls = Calls(make, "trtllm_batch_decode_with_kv_cache")
    for dtype, error, words in (
        ("float8_e4m3fn", ArgumentError, "with q of dtype float8_e4m3fn; wanted k of float8_e4m3"),
        ("float8_e5m2", UnsupportedError, "q: dtype float8_e5m2"),
    ):
        calls.changes = {"query": lambda make, dtype=dtype: make(B, HQ, D, dtype=dtype)}
        with pytest.raises(error, match=words):
            calls(calls.arguments())


# --- the room of plans ---

SHAPE = TileShape(16, 64, 264, 0.25)


def test_room_for_decodes() -> None:
    plain = plan_capacity(
        64, 64, 1, 131_072, 131_072, 4, 8, SHAPE, Masking(), last_block_merges=False
    )
    assert plain == (64, 4 * 33, 33)
    assert plain.limits() == (64 + 132, 64, 64 + 132)
    short = plan_capacity(64, 64, 1, 131_072, 64, 4, 8, SHAPE, Masking(), last_block_merges=False)
    assert short == (64, 0, 33)
    window = plan_capacity(
        1, 1, 1, 131_072, 131_072, 4, 8, SHAPE, Masking(63), last_block_merges=False
    )
    assert window.num_more == 0


def test_room_for_prefills() -> None:
    shape = TileShape(128, 48, 264, 4.0)
    masking = Masking(-1, 0)
    few = plan_capacity(2, 300, -1, 8192, 8192, 4, 8, shape, masking, last_block_merges=True)
    assert few == (2 + 9, 132, 33)
    many = plan_capacity(8, 4096, -1, 8192, 8192, 4, 8, shape, masking, last_block_merges=True)
    assert many == (8 + 128, 0, 33)
