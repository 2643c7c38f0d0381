"""Cases by lists without a GPU: draws, lists, every implementation beside the float64 answer."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn
from benchmarks import oracle, peers
from benchmarks.lists import peer_flashinfer, peer_gather, peer_triton
from benchmarks.lists.case import ListCase, pattern
from benchmarks.lists.inputs import make_list_inputs
from benchmarks.lists.oracle import expect_lists
from benchmarks.peers import prebuild
from benchmarks.results import FILE_NAME, Results
from benchmarks.sweep import cli as sweep
from benchmarks.sweep.draw import draw_cases, model_of
from benchmarks.sweep.plans import plan_of
from cupyattn import flash_mla, sparse

torch = pytest.importorskip("torch")


def small(family: str, **more: Any) -> ListCase:
    """A drawn case of a family with few heads and keys."""
    case = next(x for x in draw_cases(2, 80, ["sparse"]) if model_of(x).split()[0] == family)
    assert isinstance(case, ListCase)
    sizes: dict[str, Any] = {"requests": ((1, 2, 300), (1, 2, 41)), "num_qo_heads": 4}
    if family in ("m3", "nsa"):
        sizes |= {"num_kv_heads": 2, "lists": 2, "entries": 2, "granularity": 64, "page_size": 128}
        sizes |= {"kv_dtype": "bfloat16", "kept": 0.8}
    elif family == "qsa":
        sizes |= {"num_kv_heads": 2, "entries": 9, "head_dim_qk": 32, "head_dim_vo": 32}
        sizes |= {"kv_dtype": "bfloat16"}
    elif family == "blocks":
        sizes |= {"requests": ((1, 384, 384),), "num_kv_heads": 2, "block_rows": 64}
        sizes |= {"granularity": 64, "head_dim_qk": 32, "head_dim_vo": 32, "density": 0.5}
    else:
        sizes |= {"requests": ((3, 1, 150), (1, 1, 5)), "entries": 64}
        sizes |= {"row_bytes": 584, "second": 32} if family == "v4" else {"row_bytes": 0}
    return replace(case, name=f"small {family}", **(sizes | more))


def packed() -> ListCase:
    return small("dsa", row_bytes=656, kv_dtype="float8_e4m3fn")


def errors(name: str, case: ListCase) -> dict[str, float]:
    inputs = make_list_inputs(case, "cpu")
    expected = expect_lists(case, inputs)
    return {
        offered.label: oracle.judge(expected, offered.output(offered.call())).relative
        for offered in peers.candidates(name, case, inputs)
    }


def test_draws_are_of_all_families_and_fit() -> None:
    cases = draw_cases(11, 150, ["sparse"])
    assert cases == draw_cases(11, 160, ["sparse"])[:150]
    assert len({case.name for case in cases}) == 150
    assert Counter(map(model_of, cases)).keys() == {
        *("m3 decode", "m3 verify", "m3 prompt", "qsa decode", "qsa prompt", "nsa decode"),
        *("nsa prompt", "dsa decode", "dsa prompt", "v4 decode", "blocks"),
    }
    for case in cases:
        assert isinstance(case, ListCase) and plan_of(case) is None
        assert case.is_latent or case.family == "blocks" or case.page_size % case.granularity == 0
        assert len({*case.q_lens}) == 1 and case.q_lens[0] <= min(case.kv_lens)
        assert case.bytes > 0 and case.flops > 0
        width = case.num_kv_heads * (case.head_dim_qk + case.head_dim_vo)
        assert case.kv_offsets[-1] * width * case.groups[0].kv_itemsize < 9 << 30, case.name
    assert {case.kept for case in cases} == {0.0, 0.7, 0.8, 0.9}  # type: ignore[attr-defined]
    assert {case.row_bytes for case in cases} == {0, 584, 656}  # type: ignore[attr-defined]


def test_lists_are_ascending_and_change_as_often_as_they_should() -> None:
    case = small("m3", requests=((1, 200, 6000),), entries=16, page_size=64)
    for kept in (0.0, 0.7, 0.9):
        lists = make_list_inputs(replace(case, kept=kept), "cpu").lists.numpy()
        last = -(-np.array(case.seen) // 64) - 1
        assert (np.diff(lists, axis=-1) > 0).all() and (lists[..., -1] == last[:, None]).all()
        same = [
            len({*a} & {*b}) for x, y in pairwise(lists)
            for a, b in zip(x[:, :-1], y[:, :-1], strict=True)
        ]  # fmt: skip
        assert abs(np.mean(same) / 15 - max(kept, 0.16)) < 0.1, kept
    # Where there are fewer blocks than entries all are listed, then -1.
    few = make_list_inputs(replace(case, requests=((1, 2, 130),)), "cpu").lists
    assert few.tolist() == [[[0, 1, 2] + [-1] * 13] * 2] * 2


def test_a_group_of_a_sweep(tmp_path: Any) -> None:
    """Families are listed as models are, and each peer with its time over ours."""
    options = ["--seed", "2", "--count", "12", "--groups", "sparse", "--out", str(tmp_path)]
    args = sweep.parse(options)
    results = Results(tmp_path / FILE_NAME)
    for number, case in enumerate(args.cases):
        rows = [
            {"peer": peer, "variant": "x", "us": us, "status": "timed", "relative_error": 0.002}
            for peer, us in (("ours", 10.0), ("triton", 25.0), ("gather", 30.0 + number))
        ]
        results.add_case(case, [{"case": case.name, "op": case.op} | row for row in rows])
    results.save()
    found = sweep.write(args)
    assert found["groups"]["sparse"]["met"] and found["all"]["least"] == pytest.approx(2.5)
    assert set(found["by_model"]) == {model_of(case) for case in args.cases}
    text = (tmp_path / sweep.TABLE_NAME).read_text()
    assert "    ratios: 2.00 to 3.00: 12\n" in text
    assert "2.00, 1.00  met" in text and "triton                12 shapes   2.500" in text


def test_a_pattern_has_its_density_and_the_diagonal() -> None:
    case = small("blocks", requests=((1, 2048, 2048),), density=0.25)
    indptr, blocks = pattern(case)
    rows = [blocks[a:b] for a, b in pairwise(indptr)]
    assert all(row[-1] == i and (np.diff(row) > 0).all() for i, row in enumerate(rows))
    assert abs(len(blocks) / (32 * 33 / 2) - 0.25) < 0.04
    assert case.pairs == len(blocks) * 64 * 64


@pytest.mark.parametrize("family", ["m3", "nsa", "qsa", "dsa", "v4", "blocks"])
def test_ours_is_right(family: str) -> None:
    assert max(errors("ours", small(family)).values()) < oracle.TOLERANCE


def test_ours_is_right_over_rows_of_656_bytes() -> None:
    assert max(errors("ours", packed()).values()) < oracle.TOLERANCE


@pytest.mark.parametrize("family", ["m3", "qsa", "dsa", "v4", "blocks"])
def test_flashinfer_is_given_lists_as_page_tables(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our functions of FlashInfer's names, which take the same arguments."""
    monkeypatch.setitem(sys.modules, "flashinfer", cupyattn)
    monkeypatch.setattr(peer_flashinfer, "has_cake", lambda case, build: False)
    found = errors("flashinfer_fa3", small(family))
    assert len(found) == 1 and max(found.values()) < oracle.TOLERANCE


def test_masks_of_64_are_given_to_the_kernel_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", cupyattn)
    jit = SimpleNamespace(
        gen_cake_vsa_sm90_module=lambda stage: SimpleNamespace(get_library_path=lambda: "/none")
    )
    monkeypatch.setitem(sys.modules, "flashinfer.jit", SimpleNamespace(cake_vsa_sm90=jit))
    case = small("blocks", num_kv_heads=4)
    found = errors("flashinfer_fa3", case)
    assert found.keys() == {"flashinfer_fa3:blocks", "flashinfer_fa3:cake"}
    assert max(found.values()) < oracle.TOLERANCE
    assert peer_flashinfer.has_cake(case, True) and not peer_flashinfer.has_cake(case, False)
    for other in (small("blocks"), replace(case, block_rows=128)):
        assert not peer_flashinfer.has_cake(other, True)


def test_flashinfer_modules_of_lists() -> None:
    cases = [small("m3"), small("dsa"), small("m3", kv_dtype="float8_e4m3fn")]
    found = prebuild.modules(cases, ["fa2", "fa3"])
    assert [(x.kind, x.backend, x.kv_dtype) for x in found] == [
        ("batch_prefill", "fa2", "bfloat16"),
        ("batch_prefill", "fa3", "bfloat16"),
        ("batch_mla", "fa3", "bfloat16"),
        ("batch_prefill", "fa2", "float8_e4m3fn"),
    ]


def test_flashinfer_is_not_built_where_it_must_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_flashinfer, "is_built", lambda module: False)
    case = small("m3")
    with pytest.raises(peers.Unsupported, match="not built"):
        peers.candidates("flashinfer_fa2", case, None, build=False)


@pytest.mark.parametrize("family", ["m3", "qsa"])
def test_listed_keys_are_gathered(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(q: Any, k: Any, v: Any, starts: Any, offsets: Any, rows: int, longest: int) -> Any:
        return cupyattn.flash_attn.flash_attn_varlen_func(
            q, k.contiguous(), v.contiguous(), starts, offsets, rows, longest
        )

    monkeypatch.setattr(peer_gather, "attend_varlen", varlen)
    monkeypatch.setattr(
        peer_gather, "attend_dense", torch.nn.functional.scaled_dot_product_attention
    )
    assert errors("gather", small(family)).keys() == {"gather:varlen"}
    assert max(errors("gather", small(family)).values()) < oracle.TOLERANCE
    fp8 = small(family, kv_dtype="float8_e4m3fn", requests=((3, 1, 256),))
    found = errors("gather", fp8)
    assert len(found) == 2 and max(found.values()) < oracle.TOLERANCE


def test_triton_kernels_come_from_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv(peer_triton.FOLDER_VARIABLE, raising=False)
    with pytest.raises(peers.Unsupported, match="does not name a folder with m3"):
        errors("triton", small("m3"))
    for name in ("m3", "qsa"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setenv(peer_triton.FOLDER_VARIABLE, str(tmp_path))
    m3, qsa = ModuleType("m3"), ModuleType("qsa")

    def decode(
        q: Any, pages: Any, lists: Any, table: Any, lengths: Any, heads: int, scale: float,
        out: Any, tokens: int, block: int,
    ) -> None:  # fmt: skip
        k, v = pages.chunk(2, -1)
        assert heads == pages.shape[1] and q.shape[0] == tokens * len(lengths)
        sparse.attend(
            q, (k, v), lists.transpose(0, 1), table, lengths, granularity=block, sm_scale=scale,
            kv_layout="HND", out=out,
        )  # fmt: skip

    def prefill(*args: Any) -> None:
        q, pages, lists, table, offsets, lengths, before, tokens, heads, scale, out, block = args
        assert (before + tokens).tolist() == lengths.tolist() and offsets.tolist() == [0, tokens]
        decode(q, pages, lists, table, lengths, heads, scale, out, tokens, block)

    def attend(
        q: Any, k: Any, v: Any, keys: Any, table: Any, request: Any, is_prompt: bool, out: Any,
        gate: Any,
    ) -> None:  # fmt: skip
        assert ((keys[:, :-1] >= 0).sum(1) == keys[:, -1]).all() and not is_prompt
        assert torch.sigmoid(gate.float()).min() == 1.0
        lengths = torch.tensor([300, 300, 41, 41], dtype=torch.int32) - torch.tensor([1, 0, 1, 0])
        rows = table[request.long()].contiguous()
        sparse.attend(q, (k, v), keys[:, :-1].contiguous(), rows, lengths.int(), out=out)

    m3.decode, m3.prefill, qsa.attend = decode, prefill, attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "m3", m3)
    monkeypatch.setitem(sys.modules, "qsa", qsa)
    for case in (small("m3"), small("m3", requests=((1, 20, 300),)), small("qsa")):
        found = errors("triton", case)
        assert len(found) == 1 and max(found.values()) < oracle.TOLERANCE


@pytest.mark.parametrize("family", ["m3", "qsa", "dsa", "v4"])
def test_flash_attention_3_is_given_page_tables(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence by itself in float32, as its page table and length say."""

    def forward(rows: Any, keys: Any, values: Any, **x: Any) -> Any:
        answers = []
        for i, q in enumerate(rows):
            pages = x["page_table"][i].long()
            k, v = (a[pages].flatten(0, 1)[: x["seqused_k"][i], 0].float() for a in (keys, values))
            logits = q[0].float() @ k.T
            if "q_v" in x:
                logits += x["q_v"][i, 0].float() @ v.T
            answers.append(torch.softmax(logits * x["softmax_scale"], -1) @ v)
        assert x["num_splits"] in (0, 1) and not x["is_causal"]
        return torch.stack(answers)[:, None], None

    monkeypatch.setattr("benchmarks.lists.peer_fa3.forward", lambda: forward)
    found = errors("fa3", small(family))
    assert found.keys() == {"fa3:pages", "fa3:unsplit"} and max(found.values()) < oracle.TOLERANCE
    with pytest.raises(peers.Unsupported, match="no fp8 KV"):
        errors("fa3", small("m3", kv_dtype="float8_e4m3fn"))


def test_flashmla_reads_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*args: Any) -> Any:
        q, cache, dim, _, _, scale, causal, *schedule, is_fp8, lists = args
        assert schedule == ["metadata", "splits"] and is_fp8 and not causal
        return flash_mla.flash_mla_with_kvcache(
            q, cache.view(torch.uint8), None, None, dim, softmax_scale=scale, indices=lists,
            is_fp8_kvcache=True,
        )  # fmt: skip

    ops = SimpleNamespace(
        get_mla_decoding_metadata=lambda lengths, *_: ("metadata", "splits"),
        sparse_prefill_fwd=flash_mla.flash_mla_sparse_fwd,
        fwd_kvcache_mla=decode,
    )
    monkeypatch.setattr("benchmarks.lists.peer_flashmla.library", lambda: ops)
    for case in (small("dsa"), packed(), small("dsa", num_qo_heads=64)):
        assert max(errors("flashmla", case).values()) < oracle.TOLERANCE
    with pytest.raises(peers.Unsupported, match="one list"):
        errors("flashmla", small("v4"))
