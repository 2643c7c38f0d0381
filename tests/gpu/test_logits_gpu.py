"""User-written logits on a GPU, against the same expressions in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.logits_calls import EXPRESSIONS, Batch, FarBiases, Single, compare, requests
from helpers.on_gpu import capture, framework, workspace
from helpers.poison import upload

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

REQUESTS = requests()
LENGTHS = {
    "ragged": ([140, 0, 3, 90, 1], [450, 20, 1333, 90, 700]),
    "paged": ([140, 0, 3, 90, 1], [450, 20, 1333, 90, 700]),
    "decode": ([1] * 5, [450, 0, 2000, 33, 1]),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_one_request(name: str) -> None:
    call = Single(**REQUESTS[name])
    xp = framework(list(REQUESTS).index(name))
    compare(call.run(xp), call.run(), REQUESTS[name].get("dtype", "float16"))


@pytest.mark.parametrize("is_by_row", [False, True])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("qo_len, kv_len", [(300, 1024), (1024, 8192), (17, 2048), (1, 4096)])
def test_biases_of_any_finite_size(qo_len: int, kv_len: int, dim: int, is_by_row: bool) -> None:
    dtype = "float16" if dim == 128 else "bfloat16"
    call = FarBiases(qo_len, kv_len, dim, dtype=dtype, is_by_row=is_by_row)
    # What a split tells of such a row is its maximum, so that splits of few keys count too much.
    call.compare(call.run(framework(dim // 8)), 4e-3 if qo_len == 1024 and dim == 128 else 2.5e-2)


def test_a_transform_beside_a_custom_mask() -> None:
    seen = np.random.default_rng(0).random((150, 400)) < 0.5
    call = Single("alibi", 150, 400, custom_mask=seen)
    compare(call.run(cupy), call.run())


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(
    "name", ["requests", "near keys", "rel_logits", "rel_logits, masked", "mask", "both", "cap"]
)
def test_a_batch(name: str, kind: str, split: int | None) -> None:
    xp = framework(list(EXPRESSIONS).index(name))
    if name == "both" and kind != "ragged":
        kind = "paged"  # `seen` has the rows of the longest request
    call = Batch(name, kind, *LENGTHS[kind], dims=(128, 128), fixed_split_size=split)
    wrapper, wanted = call.plan(xp, workspace(xp)), call.run(call.plan())
    for _ in range(2):
        compare(call.run(wrapper, xp), wanted)


def test_pages_that_no_box_fits_and_fp8_pages() -> None:
    for page_size, kv_dtype in ((5, "float16"), (1, "float16"), (16, "float8_e5m2")):
        call = Batch(
            "requests", "paged", *LENGTHS["paged"], page_size=page_size, kv_dtype=kv_dtype,
            dims=(128, 128),
        )  # fmt: skip
        wrapper = call.plan(cupy, workspace(cupy))
        compare(call.run(wrapper, cupy), call.run(call.plan()))


def test_a_run_replaces_arrays_and_the_plans_come_back() -> None:
    call = Batch("requests", "ragged", *LENGTHS["ragged"])
    on_cpu, on_gpu = call.plan(), call.plan(cupy, workspace(cupy))
    other = call.options["logits_params"]["t"][::-1].copy()
    for given in ({}, {"t": other}, {}):
        compare(call.run(on_gpu, cupy, **given), call.run(on_cpu, **given))


def test_a_graph_reads_the_arrays_of_the_day() -> None:
    torch = pytest.importorskip("torch")
    call = Single("alibi", 150, 400, dtype="bfloat16")
    q, k, v = (upload(x, torch) for x in call.arrays)
    slopes = call.options["logits_params"]["slopes"]
    on_gpu = upload(slopes, torch)
    options = call.options | {"logits_params": {"slopes": on_gpu}, "return_lse": False}
    out = torch.empty((150, 6, 64), dtype=torch.bfloat16, device="cuda")
    run = lambda: cupyattn.single_prefill_with_kv_cache(q, k, v, out=out, **options)  # noqa: E731
    run()
    replay = capture(torch, torch, run)
    for factor in (1.0, 3.0):
        on_gpu.copy_(torch.from_numpy(slopes * factor))
        replay()
        again = call.options | {"logits_params": {"slopes": slopes * np.float32(factor)}}
        wanted = cupyattn.single_prefill_with_kv_cache(*call.arrays, **again)
        np.testing.assert_allclose(
            out.float().cpu().numpy(), wanted[0].astype(np.float32), rtol=2.5e-2, atol=2.5e-2
        )


def test_hidden_values_that_are_no_numbers_touch_no_row() -> None:
    for lengths in ((150, 600), (20, 600), (2, 600)):
        call = Single("requests", *lengths, dims=(128, 128))
        wanted = call.run()
        _, k, v = call.arrays
        hidden = np.arange(600) // 3 % 2 == 1
        k[hidden], v[hidden] = np.nan, np.inf
        compare(call.run(cupy), wanted)
