"""trtllm_fmha_v2_prefill over chunks and over pages of K and V apart, and TensorRT-LLM's scales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import on_gpu
from helpers.batches import offsets
from helpers.fmha_calls import LAYOUTS, Chunked
from helpers.poison import download, upload

import cupyattn
from cupyattn.core import dtypes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [0, 24, 64])
def test_chunks_and_pages_apart(layout: str, chunk: int) -> None:
    for turn, seed in enumerate(range(chunk, chunk + 4)):
        xp = on_gpu.framework(turn)
        case = Chunked(seed, layout, chunk, lambda x, xp=xp: upload(x, xp))  # type: ignore[misc]
        got, lse = case(on_gpu.workspace(xp), return_lse=True)
        out, stats = case(on_gpu.workspace(xp), save_softmax_stats=True)
        o, want = case.expected()
        np.testing.assert_allclose(download(got), o, rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(download(lse), want, rtol=1e-3, atol=1e-2)
        np.testing.assert_array_equal(download(out), download(got))
        found = download(stats)[..., 0] + np.log(download(stats)[..., 1])
        np.testing.assert_allclose(found, download(lse) * math.log(2.0), rtol=1e-4, atol=1e-4)


def test_a_capture_of_chunks_follows_lengths() -> None:
    torch = pytest.importorskip("torch")
    case = Chunked(5, "Q_PAGED_KV_NHD", 32, lambda x: torch.as_tensor(x, device="cuda"))
    arguments = case.arguments(on_gpu.workspace(torch))
    out = torch.zeros((len(case.q), 4, 64), dtype=torch.float16, device="cuda")
    cupyattn.trtllm_fmha_v2_prefill(**arguments, out=out)
    replay = on_gpu.capture(
        torch, torch, lambda: cupyattn.trtllm_fmha_v2_prefill(**arguments, out=out)
    )
    case.lens[1][:] -= np.minimum(case.lens[1] - case.lens[0], 9)
    # The keys of each request stay where they are: fewer of them are there.
    arguments["seq_lens"].copy_(torch.as_tensor(case.lens[1], device="cuda"))
    out.zero_()
    replay()
    torch.cuda.synchronize()
    expected = Chunked(5, "Q_PAGED_KV_NHD", 32)
    begins = offsets(expected.lens[1])
    expected.keys = np.concatenate(
        [
            expected.keys[:, begin : begin + n]
            for begin, n in zip(begins, case.lens[1], strict=False)
        ],
        axis=1,
    )
    expected.lens = case.lens
    np.testing.assert_allclose(out.cpu().numpy(), expected.expected()[0], rtol=1e-2, atol=1e-2)


def test_fp8_values_beside_keys_of_16_bits() -> None:
    torch = pytest.importorskip("torch")
    case = Chunked(7, "SEPARATE_Q_K_V", 0)
    qo_len, kv_len = (torch.as_tensor(x, dtype=torch.int32, device="cuda") for x in case.lens)
    ends = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (qo_len, kv_len)]
    q, k, v = (torch.as_tensor(x, device="cuda").bfloat16() for x in (case.q, *case.keys))
    narrow = v.to(torch.float8_e4m3fn)

    def call(value: Any) -> Any:
        return cupyattn.trtllm_ragged_attention_deepseek(
            *(q, k, value, on_gpu.workspace(torch), kv_len, int(qo_len.max()), int(kv_len.max())),
            *(0.125, 1.0, 1.0, len(kv_len), -1, *ends, None, True, False),
        )

    assert torch.equal(call(narrow), call(narrow.bfloat16()))


@pytest.mark.parametrize("turn", [0, 1])
def test_a_scale_of_the_logits_in_base_2(turn: int) -> None:
    xp = on_gpu.framework(turn)
    rng = np.random.default_rng(0)
    q = upload(rng.normal(0, 1, (3, 8, 64)).astype(np.float16), xp)
    pool = upload(rng.normal(0, 1, (6, 2, 2, 16, 64)).astype(np.float16), xp)
    table = upload(np.arange(6, dtype=np.int32).reshape(3, 2), xp)
    lens = upload(np.array([20, 32, 5], np.int32), xp)
    given = (q, pool, on_gpu.workspace(xp), table, lens, 32)
    call = cupyattn.trtllm_batch_decode_with_kv_cache
    want = download(call(*given, bmm1_scale=0.2))
    scale = upload(np.array([0.2 * math.log2(math.e)], np.float32), xp)
    got = download(call(*given, bmm1_scale=7.0, bmm1_scale_log2=scale))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-3)
    assert dtypes.float16.numpy == got.dtype
