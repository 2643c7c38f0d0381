"""A GPU that is not there, for batches: it copies and computes in stream order, when it gets to it.

Copies and launches are put off until somebody waits, so that whatever is overwritten too early
shows. A launch reads the work list, the page table and the mask at the addresses that it is told,
and computes with the reference.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyattn import array, reference
from cupyattn.array import match
from cupyattn.core import dtypes
from cupyattn.engine import call_cache, geometry, row_mask, staging, workspace
from cupyattn.engine import latent_rows as latent
from cupyattn.launch.attention import batch, read_tables
from cupyattn.launch.driver import params
from cupyattn.launch.ops import packbits
from cupyattn.schedule.batch import WORK_FIELDS
from cupyattn.wrappers import shared_prefix

from . import device_tables, fake_gpu, gates
from .patching import replace_all

PINNED = 1 << 44  # no address of the host's


class Stream:
    """Work in order; `limit` keeps that many jobs waiting while others are added."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self.added = self.done = self.launches = 0
        self.copies: list[tuple[int, int, int]] = []
        self.waits = 0
        self.readings: list[bool] = []  # of tables, and whether a list was made
        # What a GPU's allocators give back in stream order, the host's do at once.
        self.kept: list[Any] = []

    def add(self, job: Callable[[], None]) -> int:
        self.added += 1
        self.jobs.append((self.added, job))
        return self.added

    def finish(self, upto: int | None = None) -> None:
        while self.jobs and (upto is None or self.jobs[0][0] <= upto):
            self.done, job = self.jobs.popleft()
            job()


class Event:
    """An event of the fake stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.place = stream, 0
        self.ptr = self

    def synchronize(self) -> None:
        self._stream.waits += self._stream.done < self.place
        self._stream.finish(self.place)


def pretend(gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Let batches run on the fake GPU; call `finish` before reading an answer."""
    stream = Stream()

    def memcpy(target: int, source: int, size: int, kind: int, raw: int) -> None:
        assert raw == fake_gpu.STREAM
        stream.copies.append((target, size, kind))
        stream.add(lambda: ctypes.memmove(target, source, size))

    def record(event: Event, raw: int) -> None:
        event.place = stream.add(lambda: None)

    gpu.api.runtime.memcpyAsync = memcpy
    gpu.api.runtime.eventRecord = record
    monkeypatch.setattr(staging, "_make_event", lambda: Event(stream))
    monkeypatch.setattr(staging, "alloc_pinned", _alloc)

    def read(asked: Any, planner: Any, words: int, device: int, raw: int) -> np.ndarray:
        assert raw == fake_gpu.STREAM and device == 0
        stream.finish()  # the host waits for it
        numbers, made = device_tables.land(asked, planner)
        if made.size:
            assert made.size <= planner.num_words
            memory(words, np.dtype(np.int32), made.size)[...] = made
        stream.readings.append(bool(made.size))
        return numbers

    def keeping(real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, which gives allocators, with every array that they make kept."""

        def make_allocator(*args: Any) -> Callable[..., Any] | None:
            allocate = real(*args)
            if allocate is None:
                return None

            def allocate_and_keep(given: Any) -> Any:
                stream.kept.append(allocate(given))
                return stream.kept[-1]

            return allocate_and_keep

        return make_allocator

    allocators = array.allocator, call_cache._maker, call_cache._maker_like
    replace_all(
        monkeypatch,
        (array.to_host, _to_host),
        (array.to_host_together, lambda views: [_to_host(v) for v in views]),
        *((real, keeping(real)) for real in allocators),
        (workspace.int32_on_device, _narrow),
        (read_tables.read, read),
    )
    monkeypatch.setattr(packbits, "launch", lambda *a, **named: _packbits(stream, *a, **named))
    monkeypatch.setattr(batch.BatchLauncher, "bind", lambda *a, **_: BoundRun(stream, *a))
    # Tensor maps are made by libcuda, which need not be here.
    monkeypatch.setattr(latent, "_boxes", lambda pages: None)
    forget()
    return stream


def forget() -> None:
    geometry._geometries.clear()
    call_cache.clear_all()
    shared_prefix._padded.clear()


def _alloc(num_words: int) -> tuple[np.ndarray, object]:
    words = np.full(num_words, -1, np.int32)
    return words, words


def memory(address: int, dtype: np.dtype, *shape: int) -> np.ndarray:
    """What is at an address, as an array without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(raw, dtype).reshape(shape)


def _to_host(v: array.ArrayView) -> np.ndarray:
    return array.as_numpy(
        array.ArrayView(v.ptr, v.shape, v.strides, v.dtype, array.CPU, "", v.readonly, v.owner)
    )


def _narrow(v: array.ArrayView, name: str) -> array.ArrayView:
    if v.dtype is dtypes.int32 and match.is_contiguous(v):
        return v
    x = array.view(array.empty(v.shape, dtypes.int32, v), name)
    memory(x.ptr, np.dtype(np.int32), *v.shape)[...] = _to_host(v)
    return x


def _packbits(
    stream: Stream,
    bits: Any,
    packed: Any,
    begins: Any,
    starts: Any,
    *_: Any,
    num_segments: int = 1,
) -> None:
    def job() -> None:
        values = memory(bits.ptr, np.dtype(bool), bits.shape[0])
        out = memory(packed.ptr, np.dtype(np.uint8), packed.shape[0])
        if begins is None:
            rows = values.reshape(num_segments, -1)
            out[...] = np.packbits(rows, axis=1, bitorder="little").ravel()
            return
        edges = (memory(x.ptr, np.dtype(np.int64), x.shape[0]) for x in (begins, starts))
        begin, start = edges
        for i in range(len(begin) - 1):
            own = np.packbits(values[begin[i] : begin[i + 1]], bitorder="little")
            out[start[i] : start[i] + own.size] = own

    stream.add(job)


class BoundRun:
    """A run that computes with the reference, when the stream gets to it."""

    def __init__(self, stream: Stream, *plan: Any) -> None:
        has_lse_scale = len(plan) > 12
        self._stream, self._plan = stream, plan if has_lse_scale else (*plan, 1.0)

    def launch(self, *args: Any) -> None:
        *arrays, raw = args[:6]
        assert raw == fake_gpu.STREAM
        self._stream.launches += 1
        self._stream.add(lambda: _compute(*self._plan, *arrays, *args[6:]))


def _compute(
    launcher: Any,
    schedule: Any,
    words: int,
    workspace: int,
    strides: bytes,
    num_keys: int,
    kv_indices: int,
    mask_bytes: int,
    mask_row_bytes: int,
    output_scale: float,
    sm_scale: float,
    _rotated: int,
    lse_scale: float,
    q: int,
    k: int,
    v: int,
    o: int,
    optional: bytes,
    latent: bytes = b"",
) -> None:
    assert words % 16 == 0 and workspace % 16 == 0
    # The words of a list that the device has made are only there.
    size = max((schedule.words.size, *(part.merges // 4 for part in schedule.parts)))
    on_device = memory(words, np.dtype(np.int32), size)
    steps = params.STRIDES.unpack(strides)
    pointers = params.OPTIONAL.unpack(optional)
    problem = launcher.problem
    group, kv_heads = launcher.group_size, launcher.num_kv_heads
    heads = group * kv_heads
    per_head = [
        None if not p else memory(p, np.dtype(np.float32), n)
        for p, n in zip(pointers[2:6], (heads, heads, kv_heads, kv_heads), strict=True)
    ]
    spec = launcher.spec
    answers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    sinks = per_head[0]
    is_cascade = schedule.parts and schedule.parts[-1].merge_sizes[1] > 0
    for request in _requests(schedule, on_device):
        q_start, qo_len, kv_start, kv_len, mask_start, key_offset = request
        mask, sequence = None, {}
        if problem.key_share:
            own_places = spec.key_share.position(np.arange(kv_len))
            sequence = {"key_positions": own_places, "whole_len": kv_len + key_offset}
        position = np.arange(qo_len)[:, None] + kv_len - qo_len
        if problem.custom_mask and problem.mask_form == "runs":
            end = q_start + qo_len
            assert pointers[1] and 8 * end <= mask_bytes
            runs = memory(pointers[1], np.dtype(np.int32), end, 2)[q_start:, :, None]
            keys = np.arange(kv_len)
            mask = (keys < runs[:, 0]) | (keys >= runs[:, 1])
            mask &= (keys <= position) | (not spec.causal)
        elif problem.custom_mask and problem.mask_form == "rows":
            end = (q_start + qo_len) * mask_row_bytes
            assert pointers[1] and end <= mask_bytes
            bits = memory(pointers[1], np.dtype(np.uint8), end).reshape(-1, mask_row_bytes)
            own = np.unpackbits(bits[q_start:], axis=1, count=qo_len, bitorder="little")
            mask = row_mask.with_earlier_keys(own[:qo_len], kv_len, **sequence)
        elif problem.custom_mask:
            size = -(-qo_len * kv_len // 8)
            assert not size or (pointers[1] and mask_start + size <= mask_bytes)
            bits = memory(pointers[1] + mask_start, np.dtype(np.uint8), size)
            mask = reference.unpack_mask(bits, qo_len, kv_len)
        rows = np.arange(q_start, q_start + qo_len)
        rope = problem.head_dim_qk - problem.head_dim_vo if problem.latent else 0
        first = problem.head_dim_qk - rope
        own_q = _gather(q, problem.dtype_q, rows * steps[0], steps[1], heads, first)
        keys = np.arange(kv_len)
        if spec.page_size:
            ids = memory(kv_indices, np.dtype(np.int32), kv_start + -(-kv_len // _size(launcher)))
            pages = ids[kv_start:].astype(np.int64)[keys // spec.page_size]
            slots = keys % spec.page_size
        else:
            pages, slots = np.zeros(kv_len, np.int64), keys + kv_start
        assert kv_len == 0 or (pages if spec.page_size else slots).max() < num_keys
        own_k, own_v = (
            _gather(x, problem.dtype_kv, pages * page + slots * slot, head, kv_heads, dim)
            for x, page, slot, head, dim in (
                (k, steps[10], steps[2], steps[3], first),
                (v, steps[11], steps[4], steps[5], problem.head_dim_vo),
            )
        )
        if rope:
            q_rope, k_rope, q_row, q_head, slot, page, *_ = params.LATENT.unpack(latent)
            of_q = _gather(q_rope, problem.dtype_q, rows * q_row, q_head, heads, rope)
            of_k = _gather(k_rope, problem.dtype_kv, pages * page + slots * slot, 0, 1, rope)
            own_q = np.concatenate([own_q, of_q], -1)
            own_k = np.concatenate([own_k, of_k], -1)
        sees: dict[str, Any] = {
            "causal": spec.causal,
            "window_left": spec.window_left,
            "window_right": spec.window_right,
        }
        if schedule.positions >= 0:
            assert problem.pos_encoding == "NONE"
            places = on_device[schedule.positions // 4 :][rows, None] - key_offset
            mask = (keys <= places) | (not spec.causal)
            mask &= (keys >= places - spec.window_left) | (spec.window_left < 0)
            sees = {}
        answer = reference.attention(
            own_q,
            own_k,
            own_v,
            **sees,
            **sequence,
            mask=mask,
            logits_soft_cap=spec.logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=problem.pos_encoding,
            rope_scale=spec.rope_scale,
            rope_theta=spec.rope_theta,
            sinks=None if is_cascade else sinks,
            scale_q=per_head[1],
            scale_k=per_head[2],
            scale_v=per_head[3],
        )
        for index, row in enumerate(rows.tolist()):
            state = tuple(x[index : index + 1] for x in answer)
            answers[row] = reference.merge_state(*answers[row], *state) if row in answers else state
    if is_cascade:
        _finish_levels(answers, schedule.parts[-1], on_device, sinks, (heads, problem.head_dim_vo))
    for row, (value, total) in answers.items():
        place = np.array([row])
        value = value * _gates(problem, pointers[-1], place, heads)
        _scatter(o, value * output_scale, problem.dtype_o, place * steps[6], steps[7])
        if pointers[0]:
            total = lse_scale * total
            _scatter(pointers[0], total[..., None], dtypes.float32, place * steps[8], steps[9])


def _gates(problem: Any, logits_arrays: bytes, rows: np.ndarray, heads: int) -> Any:
    """What the output of rows is multiplied by, as a launch is told of it."""
    kind = problem.output_gate
    if kind is None:
        return 1.0
    begin = params.LOGITS_ARRAYS.size - params.OUTPUT_GATE.size
    address, stride_n, stride_h = params.OUTPUT_GATE.unpack_from(logits_arrays, begin)
    columns = problem.head_dim_vo if kind.of_elements else 1
    return gates.sigmoid(_gather(address, kind.dtype, rows * stride_n, stride_h, heads, columns))


def _requests(schedule: Any, on_device: np.ndarray) -> list[tuple[int, ...]]:
    """q_start, qo_len, kv_start, kv_len, mask_start and key_offset of each."""
    found = set()
    for part in schedule.parts:
        count = (part.merges - part.items) // (4 * len(WORK_FIELDS))
        table = on_device[part.items // 4 :][: count * len(WORK_FIELDS)].reshape(count, -1)
        for row in table.tolist():
            if row[6]:
                found.add((*row[:4], row[8] % 2**32 + (row[9] << 32), row[11]))
    return sorted(found)


def _finish_levels(
    answers: dict[int, tuple[np.ndarray, np.ndarray]],
    part: Any,
    on_device: np.ndarray,
    sinks: np.ndarray | None,
    shape: tuple[int, int],
) -> None:
    """Sinks, and rows without keys, as merge_levels has them."""
    rows, levels = part.merge_sizes
    table = on_device[part.merges // 4 :][: 2 * rows * levels].reshape(rows, levels, 2)
    log2_e = np.log2(np.e)
    sink = np.full(shape[0], -np.inf) if sinks is None else sinks.astype(np.float64) * log2_e
    empty = np.zeros((1, *shape)), sink[None]
    for row in range(rows):
        if table[row, 0, 0] == -2:
            assert row not in answers
        else:
            assert (row in answers) == bool((table[row, :, 0] >= 0).any())
            state = answers.get(row, (np.zeros((1, *shape)), np.full((1, shape[0]), -np.inf)))
            answers[row] = reference.merge_state(*state, *empty)


def _size(launcher: Any) -> int:
    return launcher.spec.page_size


def _offsets(rows: np.ndarray, step: int, heads: int, dim: int) -> np.ndarray:
    return rows[:, None, None] + np.arange(heads)[:, None] * step + np.arange(dim)


def _gather(
    address: int, dtype: Any, rows: np.ndarray, step: int, heads: int, dim: int
) -> np.ndarray:
    where = _offsets(rows, step, heads, dim)
    return memory(address, dtype.numpy, int(where.max(initial=0)) + 1)[where]


def _scatter(address: int, values: np.ndarray, dtype: Any, rows: np.ndarray, step: int) -> None:
    where = _offsets(rows, step, *values.shape[1:])
    flat = memory(address, dtype.numpy, int(where.max(initial=0)) + 1)
    flat[where] = values.astype(dtype.numpy)


class Device:
    """Arrays on the GPU, by what is on the host."""

    def __init__(self, make: Callable[..., Any], stream: Stream) -> None:
        self.make, self.stream = make, stream

    def put(self, a: np.ndarray) -> Any:
        x = self.make(*a.shape, dtype=dtypes.BY_NUMPY[a.dtype].name)
        if a.size:
            memory(fake_gpu.pointer(x), a.dtype, *a.shape)[...] = a
        self.stream.kept.append(x)
        return x

    def get(self, x: Any) -> np.ndarray:
        self.stream.finish()
        return np.array(array.to_host(array.view(x, "x")))

    def workspace(self, size: int = 1 << 25) -> Any:
        return self.make(size, dtype="uint8")


def check(device: Device, got: Any, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    o, lse = (device.get(x) for x in got)
    np.testing.assert_array_equal(o, wanted[0].astype(o.dtype))
    np.testing.assert_allclose(lse, wanted[1].astype(np.float32), rtol=1e-6)
