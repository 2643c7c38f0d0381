"""Calls of latent attention on poisoned arrays: what no request owns is NaN, or an absurd id."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import flash_mla, mla
from cupyattn.core import dtypes
from cupyattn.reference.latent_rows import NUM_BYTES, pack_rows, unpack_rows

from . import calls, poison
from .batches import blank_pages, fill_pages, offsets
from .mla_cases import Case

ABSURD = 2**31 - 1
# Calls of FlashMLA's functions, whose LSE has no sink, and +inf for rows without keys.
_FLASH = "flash_mla", "list of tokens", "flat list"


class Call(calls.Call):
    """Requests in pages, or tokens with a list of keys each."""

    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        super().__init__(case, xp, case.seed, 94)
        self.workspace, problem = workspace, case.problem
        self.latent, self.rope = problem.dims
        self.head_dim_qk = self.both = self.latent + self.rope
        rows = sum(case.qo_len)
        self.q = self.values(rows, case.heads, self.both, dtype=problem.dtype)
        self.qo_indptr = offsets(case.qo_len)
        self.sinks = None
        if case.has_sinks:
            self.sinks = calls.drawn_sinks(self.rng, case.heads)
        self._place_keys()
        self.device_q = self._parts("q", self.q)
        self.device_cache = self._parts("cache", self.pool)
        shape = (rows, case.heads, self.latent)
        self.answer_shape = case.heads, self.latent, dtypes.parse(problem.dtype).numpy
        self.out = self.blank("out", shape, self.q.dtype, self._strides(shape))
        self.lse = self.blank("lse", shape[:2], np.float32)
        if case.way in ("wrapper", "metadata"):
            self.wrapper = self._planned()

    # --- inputs ---

    def _strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return poison.strides(shape, self.case.problem.is_aligned, self.case.is_padded)

    @property
    def _takes_parts(self) -> bool:
        return self.case.is_split and self.case.way in ("wrapper", "metadata", "forward")

    def _parts(self, name: str, values: np.ndarray) -> Any:
        """One array of both parts, or a pair."""
        if not self._takes_parts:
            return self.embed(name, values, self._strides(values.shape))
        parts = values[..., : self.latent], values[..., self.latent :]
        return tuple(
            self.embed(f"{name}[{i}]", np.ascontiguousarray(x), self._strides(x.shape))
            for i, x in enumerate(parts)
        )

    def _rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Random rows of the cache as they are stored, and what they stand for."""
        case = self.case
        values = self.values(count, self.both, dtype=case.problem.kv_dtype)
        if case.form != "rows":
            return values, values
        sizes = np.exp2(self.rng.uniform(-4, 1, (count, 1)).astype(np.float32))
        rows = pack_rows(values.astype(np.float32) * sizes)
        return rows, unpack_rows(rows)

    def _pool_of(self, *shape: int) -> np.ndarray:
        """Pages of nobody."""
        if self.case.form == "rows":
            return np.full((*shape, NUM_BYTES), 0xFF, np.uint8)
        kind = dtypes.parse(self.case.problem.kv_dtype).numpy
        return blank_pages(*shape, self.both, dtype=kind)

    def _place_keys(self) -> None:
        case = self.case
        if case.is_list:
            self._place_list()
            return
        pages = [-(-n // case.page_size) for n in case.kv_len]
        self.kv_indptr = offsets(pages)
        count = sum(pages) + 3
        order = self.rng.permutation(count)[: sum(pages)].astype(np.int32)
        pool = self._pool_of(count, case.page_size)
        self.token_scales = np.full(pool.shape[:2], np.nan, np.float32)
        self.keys = []
        self.table = np.full((len(pages), max((1, *pages)) + 1), ABSURD, np.int32)
        for i, n in enumerate(case.kv_len):
            own = order[self.kv_indptr[i] : self.kv_indptr[i + 1]]
            stored, values = self._rows(n)
            fill_pages(pool, own, stored)
            if case.form == "tokens":  # powers of two: no product is rounded
                scales = np.exp2(self.rng.integers(-4, 2, n)).astype(np.float32)
                fill_pages(self.token_scales, own, scales)
                values = values.astype(np.float32)
                values[:, : self.latent] *= scales[:, None]
            self.keys.append(values[:, None])
            self.table[i, : len(own)] = own
        self.pool = pool
        self.ids = np.concatenate([order, np.full(5, ABSURD, np.int32)])

    def _place_list(self) -> None:
        """A pool of which some slots are keys, and a list for each token, with repetitions."""
        case, rng = self.case, self.rng
        most = max((1, *case.kv_len))
        num_pages = -(-2 * most // case.page_size) + 1
        slots = num_pages * case.page_size
        pool = self._pool_of(slots)
        used = rng.permutation(slots)[: max(1, most)]
        pool[used], values = self._rows(len(used))
        keys = np.full((slots, self.both), np.nan, values.dtype)
        keys[used] = values
        tokens = sum(case.qo_len)
        self.lists = rng.choice(used, (tokens, most)).astype(np.int32)
        absent = rng.random(self.lists.shape) < case.absent
        # What is no slot is no key: negative, or beyond the cache.
        nothing = np.array([-1, -(2**31), slots, slots + 7, ABSURD], np.int64).astype(np.int32)
        self.lists[absent] = rng.choice(nothing, self.lists.shape)[absent]
        counts = np.repeat(np.array(case.kv_len, np.int32), case.qo_len)
        self.counts = counts if case.has_lengths else np.full(tokens, most, np.int32)
        if case.has_lengths:  # entries past the length may hold anything
            self.lists[np.arange(most) >= counts[:, None]] = ABSURD
        self.keys = []
        self.max_logits: Any = None
        for row, n in zip(self.lists, self.counts, strict=True):
            seen = row[:n]
            self.keys.append(keys[seen[(seen >= 0) & (seen < slots)]][:, None])
        self.pool = pool.reshape(num_pages, case.page_size, -1)

    # --- the call ---

    def _planned(self) -> Any:
        case = self.case
        wrapper = mla.BatchMLAPagedAttentionWrapper(self.workspace)
        lens = np.array(case.kv_len, np.int32)
        named = {
            "num_heads": case.heads,
            "head_dim_ckv": self.latent,
            "head_dim_kpe": self.rope,
            "page_size": case.page_size,
            "causal": case.causal,
            "sm_scale": case.sm_scale,
            "q_data_type": case.problem.dtype,
            "kv_data_type": case.problem.kv_dtype,
            "fixed_split_size": case.split,
        }
        if case.way == "wrapper":
            wrapper.plan(self.qo_indptr, self.kv_indptr, self.ids, lens, **named)
        else:
            table = poison.upload(self.table, self.xp)
            metadata = mla.MLAPlanMetadata.dense(self.qo_indptr, table, lens)
            mode = "basee" if case.is_natural else "none"
            wrapper.plan(metadata=metadata, lse_mode=mode, **named)
        return wrapper

    def start(self) -> None:
        way = self.case.way.replace(" ", "_")
        getattr(self, f"_start_{way}")()

    def _sinks(self) -> Any:
        return None if self.sinks is None else poison.upload(self.sinks, self.xp)

    def _start_wrapper(self) -> None:
        case, named = self.case, {"sinks": self._sinks(), "return_lse": True}
        if case.form == "tokens":
            scales = poison.upload(self.token_scales, self.xp)
            named |= {"ckv_scale_arr": scales, "kpe_scale": case.scales[1]}
        elif case.problem.kv_dtype != case.problem.dtype:
            named |= {"ckv_scale": case.scales[0], "kpe_scale": case.scales[1]}
        if case.way == "wrapper":
            named["return_lse_base_on_e"] = case.is_natural
        if self._takes_parts and case.seed % 2:
            self.run_wrapper(self.wrapper, *self.device_q, *self.device_cache, **named)
        else:
            both = {"query": self.device_q, "kv_cache": self.device_cache}
            self.run_wrapper(self.wrapper, **both, **named)

    _start_metadata = _start_wrapper

    def _index(self, values: Any) -> Any:
        return poison.upload(np.asarray(values, np.int32), self.xp)

    def _by_request(self, x: Any) -> Any:
        """Rows of the device as [requests, rows of each, ...], without a copy."""
        return calls.with_lead(x, (len(self.case.qo_len), self.case.qo_len[0]))

    def _keep(self, out: Any, lse: Any = None) -> None:
        """Answers with the leading axes of q as rows."""
        rows = sum(self.case.qo_len), self.case.heads
        self.returned = out.reshape(*rows, self.latent), None if lse is None else lse.reshape(rows)

    def _flashinfer(self, function: Any, q: Any, tables: Any, lens: Any, **named: Any) -> Any:
        """A call of FlashInfer's functions."""
        longest = 0 if lens is None else max((1, *self.case.kv_len))
        return function(
            q,
            self.device_cache,
            self.workspace,
            128,
            self.latent,
            self.rope,
            self._index(tables),
            lens,
            longest,
            bmm1_scale=self.case.sm_scale,
            sinks=self._sinks(),
            **named,
        )

    def _start_trtllm(self) -> None:
        case, named = self.case, dict[str, Any](return_lse=True)
        is_ragged = case.way == "trtllm ragged"
        own = (lambda x: x) if is_ragged else self._by_request
        if is_ragged:
            named["cum_seq_lens_q"] = self._index(self.qo_indptr)
            named["max_q_len"] = max((1, *case.qo_len))
        if case.with_out:
            named |= {"out": own(self.out.array), "lse": own(self.lse.array)}
        lens, function = self._index(case.kv_len), mla.trtllm_batch_decode_with_kv_cache_mla
        answer = self._flashinfer(function, own(self.device_q), self.table, lens, **named)
        if case.with_out:
            self.returned = self.out.array, self.lse.array
        else:
            self._keep(*answer)

    _start_trtllm_ragged = _start_trtllm

    def _start_xqa_batch(self) -> None:
        function, q = mla.xqa_batch_decode_with_kv_cache_mla, self._by_request(self.device_q)
        self._keep(self._flashinfer(function, q, self.table, self._index(self.case.kv_len)))

    def _start_list(self) -> None:
        function, q = mla.trtllm_batch_decode_with_kv_cache_mla, self._by_request(self.device_q)
        named = {"sparse_mla_top_k": self.lists.shape[1], "return_lse": True}
        if self.case.has_lengths:
            named["sparse_mla_top_k_lens"] = self._index(self.counts)
        self._keep(*self._flashinfer(function, q, self.lists[:, None], None, **named))

    def _start_xqa(self) -> None:
        case = self.case
        answer = mla.xqa_mla(
            self._by_request(self.device_q), self.device_cache, self.device_cache,
            self._index(self.table), self._index(case.kv_len), None, self.workspace, None,
            case.page_size, q_scale=case.sm_scale,
        )  # fmt: skip
        self._keep(answer)

    def _start_forward(self) -> None:
        wrapper = mla.BatchMLAPagedAttentionWrapper(self.workspace, kv_layout="NHD")
        tables = self._index(self.table), self._index(self.case.kv_len)
        self.returned = wrapper.forward(self.device_q, self.device_cache, *tables, return_lse=True)

    def _start_flash_mla(self) -> None:
        case, named = self.case, dict[str, Any]()
        tables: tuple[Any, ...] = None, None, self.latent
        if case.is_list:
            lists = self.lists.reshape(len(case.qo_len), case.qo_len[0], -1)
            named["indices"] = self._index(lists)
            named["topk_length"] = self._index(case.kv_len) if case.has_lengths else None
        else:
            metadata = flash_mla.get_mla_metadata()
            tables = self._index(self.table), self._index(case.kv_len), self.latent, *metadata
            named["causal"] = case.causal
        # Rows of 656 bytes need the axis of their one head.
        cache = self.device_cache[:, :, None] if case.form == "rows" else self.device_cache
        out, lse = flash_mla.flash_mla_with_kvcache(
            self._by_request(self.device_q), cache, *tables, softmax_scale=case.sm_scale,
            attn_sink=self._sinks(), is_fp8_kvcache=case.form == "rows", **named,
        )  # fmt: skip
        self._keep(out, lse.swapaxes(1, 2))

    _start_list_of_tokens = _start_flash_mla

    def _start_flat_list(self) -> None:
        case = self.case
        given = {"out": self.out.array} if case.with_out else {}
        out, self.max_logits, lse = flash_mla.flash_mla_sparse_fwd(
            self.device_q, self.device_cache, self._index(self.lists[:, None]), case.sm_scale,
            self.latent, self._sinks(), self._index(self.counts) if case.has_lengths else None,
            **given,
        )  # fmt: skip
        self.returned = out, lse

    def answers(self) -> calls.Answer:
        out, lse = super().answers()
        case = self.case
        is_natural = case.is_natural and case.way in ("wrapper", "metadata")
        if lse is not None and (is_natural or case.way in _FLASH):
            lse = (lse.astype(np.float64) / math.log(2.0)).astype(np.float32)
        if lse is not None and case.way in _FLASH:
            lse[lse == np.inf] = -np.inf
        return out, lse

    def check(self, out: np.ndarray, lse: np.ndarray | None, **named: Any) -> None:
        super().check(out, lse, **named)
        if self.case.way == "flat list":
            self._check_max_logits(poison.download(self.max_logits))

    def _check_max_logits(self, found: np.ndarray) -> None:
        for q, k, row in zip(self.q, self.keys, found, strict=True):
            logits = q.astype(np.float64) @ k[:, 0].astype(np.float64).T * self.case.sm_scale
            scale = np.abs(logits).max(axis=-1, initial=1.0)
            expected = logits.max(axis=-1, initial=-np.inf)
            np.testing.assert_array_equal(np.isneginf(row), np.isneginf(expected))
            seen = np.isfinite(expected)
            error = np.abs(row[seen] - expected[seen]) / scale[seen]
            assert (error < 1e-5).all(), f"{self.case}: largest logits are off by {error.max()}"

    # --- the answer ---

    def requests(self) -> Iterator[dict[str, Any]]:
        case, (scale, rope_scale) = self.case, self.case.scales
        q = self.q
        if scale != rope_scale:
            q = q.copy()
            q[..., self.latent :] = q[..., self.latent :] * q.dtype.type(rope_scale / scale)
        is_causal = case.causal and case.way in ("wrapper", "metadata", "flash_mla")
        is_causal = is_causal or case.way.startswith("trtllm")
        for i, k in enumerate(self.keys):
            rows = slice(i, i + 1) if case.is_list else slice(*self.qo_indptr[i : i + 2])
            yield {
                "q": q[rows],
                "k": k,
                "v": k[..., : self.latent],
                "causal": is_causal,
                "sm_scale": case.sm_scale * scale,
                "scale_v": scale,
                "sinks": self.sinks,
            }

    @functools.cached_property
    def _expected(self) -> tuple[calls.States, calls.States]:
        states = super().expected()
        if self.sinks is None or self.case.way not in _FLASH:
            return states
        alone = calls.attend(
            ({**request, "sinks": None} for request in self.requests()), *self.answer_shape
        )
        ref, low = ([o, lse] for (o, _), (_, lse) in zip(states, alone, strict=True))
        return ref, low

    def expected(self) -> tuple[calls.States, calls.States]:
        return self._expected
