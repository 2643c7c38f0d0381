"""Seeded calls of flash_attn's functions with options crossed, on poisoned arrays, held to an
oracle in float64 that shares nothing with the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn import flash_attn

from . import calls, compare, poison
from .plain_answers import dense, sigmoid

FORMS = "func", "varlen", "varlen pages", "varlen rows", "cache", "cache pages", "cache ragged"
_NAN = float("nan")


def turned(
    x: np.ndarray, at: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool
) -> np.ndarray:
    """x [n, heads, d], each pair as a complex number times cos + i sin of its position."""
    half = cos.shape[1]
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    made = x.astype(np.float64)
    cos, sin = cos.astype(np.float64), sin.astype(np.float64)
    z = (made[..., first] + 1j * made[..., second]) * (cos[at] + 1j * sin[at])[:, None]
    made[..., first], made[..., second] = z.real, z.imag
    return made.astype(x.dtype)


class Case(calls.Placed):
    """One call. `run` makes it and compares the answer, and what it may and may not write."""

    def __init__(
        self,
        seed: int,
        xp: ModuleType = np,
        device: str = "cpu",
        *,
        is_gpu: bool = False,
        gate: str = "",
    ) -> None:
        """is_gpu: only what has GPU kernels, which are few. gate: of gates.KINDS, "" for none."""
        super().__init__(self, xp, seed, 25, device=device)
        self.seed, self.is_gpu, rng = seed, is_gpu, self.rng
        self.form = FORMS[seed % len(FORMS)]
        self.count = int(rng.integers(1, 5))
        self.kv_heads = int(rng.integers(1, 4))
        self.heads = self.kv_heads * int(rng.integers(1, 4))
        self.dim, self.dim_v = (int(rng.choice([16, 24, 32])) for _ in range(2))
        self.dtype = np.dtype(rng.choice(["float32", "float32", "float16", "bfloat16"]))
        self.dtype_q = self.dtype_kv = self.dtype
        if self.dtype != np.float32 and rng.random() < 0.4:
            self.dtype_kv = np.dtype(rng.choice(["float8_e4m3fn", "float8_e5m2"]))
            if rng.random() < 0.5:
                self.dtype_q, self.dtype = self.dtype_kv, np.dtype(ml_dtypes.bfloat16)
        if is_gpu:
            self.dim = self.dim_v = 64
            self.dtype = self.dtype_q = self.dtype_kv = np.dtype("float16")
            if rng.random() < 0.3:
                self.dtype_kv = np.dtype(ml_dtypes.float8_e4m3fn)
        self.index = np.dtype(rng.choice(["int32", "int64"]))
        self.named: dict[str, Any] = {}
        self.options: dict[str, Any] = {"scale": 1 / math.sqrt(self.dim)}
        self.descales = np.ones((3, self.count, self.kv_heads))
        self.slopes: np.ndarray | None = None
        self.are_causal: np.ndarray | None = None
        self.gate: np.ndarray | None = None
        self._choose_options()
        self._make_requests()
        self._place()
        if gate:
            self._place_gate(gate)

    # --- options ---

    def _choose_options(self) -> None:
        rng, named, options = self.rng, self.named, self.options
        if rng.random() < 0.5:
            named["softmax_scale"] = options["scale"] = float(rng.uniform(0.05, 0.6))
        if rng.random() < 0.6:
            named["causal"] = options["causal"] = True
        if rng.random() < 0.4:
            options["window"] = tuple(int(x) for x in rng.integers(-1, 6, 2))
            named["window_size"] = rng.permutation([list, tuple])[0](options["window"])
            if rng.random() < 0.2:
                named["window_size"] = [None if x < 0 else x for x in named["window_size"]]
        if rng.random() < 0.3:
            chunk = int(rng.integers(1, 9))
            named["attention_chunk"] = options["chunk"] = chunk
        if rng.random() < 0.3:
            named["softcap"] = options["softcap"] = float(rng.uniform(0.5, 4))
        if rng.random() < 0.2:
            shape = (self.heads,) if rng.random() < 0.5 else (self.count, self.heads)
            slopes = rng.uniform(0, 0.5, shape).astype(np.float32)
            self.slopes = np.broadcast_to(slopes, (self.count, self.heads))
            named["alibi_slopes"] = self._array(slopes)
        if rng.random() < 0.3:
            kind = np.dtype(rng.choice(["float32", "bfloat16"]))
            sinks = rng.normal(0, 2, self.heads).astype(kind)
            options["sinks"] = sinks
            named[rng.choice(["sinks", "s_aux"])] = self._array(sinks)
        for place, name in enumerate(("q_descale", "k_descale", "v_descale")):
            if rng.random() < 0.5:
                self._choose_descale(place, name)
        for name, x in (("num_splits", 1), ("pack_gqa", True), ("sm_margin", 4)):
            if rng.random() < 0.2:
                named[name] = x

    def _choose_descale(self, place: int, name: str) -> None:
        shape = [(), (1,), (self.kv_heads,), (self.count, self.kv_heads)][self.rng.integers(4)]
        values = self.rng.uniform(0.3, 2, shape).astype(np.float32)
        given = self._array(values)
        if not shape and self.rng.random() < 0.5:
            one, shape = self._array(values.reshape(1)), (self.count, self.kv_heads)
            has_expand = hasattr(one, "expand")  # torch's
            given = one.expand(shape) if has_expand else self.xp.broadcast_to(one, shape)
        self.named[name] = given
        if "float8" in str(self.dtype_q if place == 0 else self.dtype_kv):
            self.descales[place] = values

    # --- requests ---

    def _make_requests(self) -> None:
        rng, form = self.rng, self.form
        is_even = form in ("func", "cache", "cache pages")
        longest = int(rng.integers(1, 7))
        self.q_lens = rng.integers(0, longest + 1, self.count)
        if is_even:
            self.q_lens[:] = rng.integers(1, longest + 1)
        self.kv_lens = rng.integers(0, 20, self.count)
        if form == "func":
            self.kv_lens[:] = rng.integers(0, 20)
        self.is_cache = form.startswith("cache")
        self.new = np.zeros(self.count, int)
        if self.is_cache and rng.random() < 0.6:
            ragged = form == "cache ragged"
            self.new = rng.integers(0, 4, self.count) if ragged else self.new + rng.integers(1, 4)
        self.pads = np.zeros(self.count, int)
        if self.is_cache and rng.random() < 0.3:
            self.pads = np.array([rng.integers(0, n + 1) for n in self.kv_lens])
        self.q = self._values(int(self.q_lens.sum()), self.heads, self.dim, dtype=self.dtype_q)
        self.keys = [
            [self._values(n, self.kv_heads, d, dtype=self.dtype_kv) for d in self._dims()]
            for n in self.kv_lens
        ]
        self.added = [
            [self._values(n, self.kv_heads, d, dtype=self.dtype_kv) for d in self._dims()]
            for n in self.new
        ]
        # A request that is none: its length is -1 and nothing is written.
        self.absent = np.zeros(self.count, bool)
        if self.new.any() and rng.random() < 0.3:
            self.absent = rng.random(self.count) < 0.3
            self.pads[self.absent] = 0

    def _dims(self) -> tuple[int, int]:
        return self.dim, self.dim_v

    def _values(self, *shape: int, dtype: np.dtype) -> np.ndarray:
        return self.rng.normal(0, 1, shape).astype(dtype)

    # --- arrays ---

    def _array(self, x: np.ndarray) -> Any:
        """A poisoned copy that the call may not write."""
        return self.embed(f"{len(self.owned)}", np.ascontiguousarray(x))

    def _strided(self, name: str, x: np.ndarray) -> Any:
        """The same with gaps between rows or heads."""
        strides = [1]
        for extent in x.shape[:0:-1]:
            gap = int(self.rng.choice([0, 0, 8]))
            if self.is_gpu and name.startswith("kv") and len(strides) != 2:
                gap = 0  # a whole number of tokens from request to request
            strides.append(strides[-1] * max(1, extent) + gap)
        return self.embed(name, x, tuple(strides[::-1]))

    def _ints(self, x: Any) -> Any:
        return self._array(np.asarray(x).astype(self.index))

    def _offsets(self, lens: np.ndarray) -> Any:
        return self._ints([0, *np.cumsum(lens)])

    def _bound(self, x: int) -> Any:
        kind = self.rng.integers(3)
        return [None, x, self._array(np.array(x, np.int32))][kind]

    def _place(self) -> None:
        form, named = self.form, self.named
        self.args: list[Any] = []
        is_even = form in ("func", "cache", "cache pages")
        lead = (self.count, int(self.q_lens[0])) if is_even else (len(self.q),)
        q = self.q.reshape(*lead, self.heads, self.dim)
        self.args.append(self._strided("q", q))
        out = np.zeros((*lead, self.heads, self.dim_v), self.dtype)
        self.out = poison.embed(out, **self.where)
        self.with_out = self.rng.random() < 0.4
        if self.with_out:
            named["out"] = self.out.array
        self.with_lse = self.rng.random() < 0.6
        if self.with_lse:
            named["return_softmax_lse"] = True
        if form == "func":
            self._place_dense()
        elif self.is_cache:
            self._place_cache()
        else:
            self._place_varlen()

    def _place_gate(self, kind: str) -> None:
        """Gates of the output; those of rows that do not count are NaN."""
        columns = (self.dim_v,) if kind.endswith("elements") else ()
        gate = self.rng.normal(0, 2, (len(self.q), self.heads, *columns))
        ends = np.cumsum(self.q_lens)
        for end, count, used in zip(ends, self.q_lens, self._used(), strict=True):
            gate[end - count + used : end] = _NAN
        self.gate = gate.astype(np.float32 if kind.startswith("float32") else self.dtype)
        lead = self.out.array.shape[:-2]
        shaped = self.gate.reshape(*lead, *gate.shape[1:])
        self.named["output_gate"] = self._strided("output_gate", shaped)

    def _used(self) -> np.ndarray:
        """How many rows of each request count."""
        used: np.ndarray = getattr(self, "used", self.q_lens)
        return used

    def _place_dense(self) -> None:
        self.function: Callable[..., Any] = flash_attn.flash_attn_func
        layouts = self.rng.random(2) < 0.3
        if self.is_gpu:
            layouts[:] = layouts[0]
        for place in range(2):
            stacked = np.stack([pair[place] for pair in self.keys])
            if layouts[place]:  # heads first in memory
                heads_first = self.embed(f"kv{place}", stacked.swapaxes(1, 2).copy())
                self.args.append(heads_first.swapaxes(1, 2))
            else:
                self.args.append(self._strided(f"kv{place}", stacked))

    def _place_varlen(self) -> None:
        rng, named = self.rng, self.named
        self.function = flash_attn.flash_attn_varlen_func
        spare = int(rng.integers(0, 3))  # requests without rows behind the last
        if (
            spare
            and self.form == "varlen"
            and not ({"alibi_slopes", "q_descale", "k_descale", "v_descale"} & {*named})
        ):
            self.q_lens, self.kv_lens = (np.pad(x, (0, spare)) for x in (self.q_lens, self.kv_lens))
            empty = [np.zeros((0, self.kv_heads, d), self.dtype_kv) for d in self._dims()]
            self.keys += [empty] * spare
            self.descales = np.ones((3, self.count + spare, self.kv_heads))
            self.count += spare
        if self.form == "varlen pages":
            table = self._pages(self.keys, self.kv_lens)
            named[rng.choice(["block_table", "page_table"])] = table
        elif self.form == "varlen rows":
            room = int(self.kv_lens.max()) + int(rng.integers(1, 3))
            for place, dim in enumerate(self._dims()):
                rows = np.full((self.count, room, self.kv_heads, dim), _NAN).astype(self.dtype_kv)
                for row, pair in zip(rows, self.keys, strict=True):
                    row[: len(pair[place])] = pair[place]
                self.args.append(self._strided(f"kv{place}", rows))
        else:
            for place in range(2):
                rows = np.concatenate([pair[place] for pair in self.keys])
                self.args.append(self._strided(f"kv{place}", rows))
        named["cu_seqlens_q"] = self._offsets(self.q_lens)
        if self.form == "varlen" or (self.form == "varlen pages" and rng.random() < 0.5):
            named["cu_seqlens_k"] = self._offsets(self.kv_lens)
            if rng.random() < 0.3:  # fewer keys than there are
                self.kv_lens = np.array([rng.integers(0, n + 1) for n in self.kv_lens])
                named["seqused_k"] = self._ints(self.kv_lens)
        else:
            named["seqused_k"] = self._ints(self.kv_lens)
        self.used = self.q_lens
        if rng.random() < 0.2:
            self.used = np.array([rng.integers(0, n + 1) for n in self.q_lens])
            named["seqused_q"] = self._ints(self.used)
        named["max_seqlen_q"] = self._bound(int(self.q_lens.max()))
        named["max_seqlen_k"] = self._bound(int(self.kv_lens.max()))
        own = np.random.default_rng((self.seed, 26))  # later than others, which stay as they were
        if self.options.get("causal") and "chunk" not in self.options and self.slopes is None:
            if own.random() < 0.5:
                self.are_causal = own.random(self.count) < 0.5
                kind = own.choice(["bool", "int32", "int64"])
                named["dynamic_causal"] = self._array(self.are_causal.astype(kind))

    def _place_cache(self) -> None:
        rng, named = self.rng, self.named
        self.function = flash_attn.flash_attn_with_kvcache
        room = self.kv_lens + self.new
        if self.form == "cache pages" or (self.form == "cache ragged" and rng.random() < 0.5):
            table = self._pages(self.keys, room)
            named[rng.choice(["page_table", "block_table"])] = table
        else:
            self._contiguous(int(room.max()) + int(rng.integers(0, 3)))
        begin = np.where(self.absent, -1, self.kv_lens)
        named["cache_seqlens"] = self._ints(begin)
        if len({*begin}) == 1 and begin[0] >= 0 and rng.random() < 0.5:
            named["cache_seqlens"] = int(begin[0])
        if self.pads.any():
            named["cache_leftpad"] = self._ints(self.pads)
        if self.form == "cache ragged":
            named["cu_seqlens_q"] = self._offsets(self.q_lens)
            named["max_seqlen_q"] = self._bound(int(self.q_lens.max()))
        if not self.new.any():
            return
        if rng.random() < 0.5 and "float8" not in f"{self.dtype_q}{self.dtype_kv}":
            self._rotate(begin)
        for place, name in enumerate("kv"):
            rows = np.concatenate([pair[place] for pair in self.unturned or self.added])
            if self.form == "cache ragged":
                named["cu_seqlens_k_new"] = named.get("cu_seqlens_k_new", self._offsets(self.new))
                named[name] = self._strided(f"new {name}", rows)
            else:
                shape = (self.count, int(self.new[0]), *rows.shape[1:])
                named[name] = self._strided(f"new {name}", rows.reshape(shape))

    unturned: list[Any] | None = None

    def _rotate(self, begin: np.ndarray) -> None:
        """Turn q and the new keys of the oracle; the call gets them as they were."""
        rng = self.rng
        half, interleaved = 8, bool(rng.random() < 0.5)
        kind = np.dtype(np.float32)
        if self.is_gpu:
            half, kind = int(rng.choice([8, 24, 32])), np.dtype(rng.choice(["float32", "float16"]))
        angles = rng.uniform(-3, 3, (64, half))
        cos, sin = (f(angles).astype(kind) for f in (np.cos, np.sin))
        self.named |= {"rotary_cos": self._array(cos), "rotary_sin": self._array(sin)}
        self.named["rotary_interleaved"] = interleaved
        starts = begin
        if rng.random() < 0.3:
            starts = np.where(self.absent, -1, rng.integers(0, 30, self.count))
            self.named["rotary_seqlens"] = self._ints(starts)
        moves = self.options.get("causal") or self.options.get("chunk")
        moves = moves or self.options.get("window", (-1, -1)) != (-1, -1)
        self.unturned = [[*pair] for pair in self.added]
        ends = np.cumsum(self.q_lens)
        for index in np.flatnonzero(~self.absent):
            pair = self.added[index]
            at = starts[index] + np.arange(len(pair[0]))
            self.added[index] = [turned(pair[0], at, cos, sin, interleaved), pair[1]]
            rows = slice(ends[index] - self.q_lens[index], ends[index])
            at = starts[index] + np.arange(self.q_lens[index]) * bool(moves)
            self.q[rows] = turned(self.q[rows], at, cos, sin, interleaved)

    def _contiguous(self, room: int) -> None:
        spare = 0
        rows = np.arange(self.count)
        if self.rng.random() < 0.4:
            spare = 2
            rows = self.rng.permutation(self.count + spare)[: self.count]
            self.named["cache_batch_idx"] = self._ints(rows)
        self.pools = []
        for place, dim in enumerate(self._dims()):
            pool = np.full((self.count + spare, max(1, room), self.kv_heads, dim), _NAN)
            pool = pool.astype(self.dtype_kv)
            for row, pair in zip(rows, self.keys, strict=True):
                pool[row, : len(pair[place])] = pair[place]
            self.args.append(self._strided(f"kv{place}", pool))
            self.pools.append(pool)
        self.slots = [[(row, at) for at in range(room)] for row in rows]

    def _pages(self, keys: list[Any], lens: np.ndarray) -> Any:
        """Pages in random order, those of nobody NaN; spare entries of the table -1 or absurd."""
        rng, size = self.rng, int(self.rng.choice([1, 3, 4, 16]))
        pages = -(-lens // size)
        order = rng.permutation(int(pages.sum()) + 2)
        width = int(pages.max()) + int(rng.integers(0, 3)) or 1
        table = np.full((self.count, width), int(rng.choice([-1, 2**31 - 1])))
        shape = len(order), size, self.kv_heads
        ends = np.cumsum(pages)
        self.slots, self.pools = [], []
        for row, own in zip(table, np.split(order, ends)[:-1], strict=True):
            row[: len(own)] = own
            self.slots.append([(page, at) for page in own for at in range(size)])
        both = np.full((*shape, sum(self._dims())), _NAN).astype(self.dtype_kv)
        parts = both[..., : self.dim], both[..., self.dim :]
        for place, pool in enumerate(parts):
            for slots, pair in zip(self.slots, keys, strict=True):
                for (page, at), row in zip(slots, pair[place], strict=False):
                    pool[page, at] = row
            self.pools.append(pool.copy())
        if rng.random() < 0.4:  # heads first, keys and values side by side, as vLLM has them
            whole = self.embed("pool", both.swapaxes(1, 2).copy()).swapaxes(1, 2)
            self.args += [whole[..., : self.dim], whole[..., self.dim :]]
        else:
            self.args += [self._strided(f"kv{i}", x.copy()) for i, x in enumerate(parts)]
        found = table
        if rng.random() < 0.3 and self.is_cache:
            rows = rng.permutation(self.count + 1)[: self.count]
            self.named["cache_batch_idx"] = self._ints(rows)
            found = np.full((self.count + 1, width), -1)
            found[rows] = table
        return self._ints(found)

    # --- the answer ---

    def run(self) -> None:
        try:
            got = self.function(*self.args, **self.named)
        except Exception as error:
            raise AssertionError(f"{self}: {error}") from error
        out, lse = got if self.with_lse else (got, None)
        if self.with_out:
            assert out is self.out.array
        out = poison.download(out).astype(np.float64)
        lse = None if lse is None else poison.download(lse)
        self._compare(out, lse)
        self._check_writes()

    def __repr__(self) -> str:
        given = {n: x for n, x in self.named.items() if not hasattr(x, "shape")}
        return f"seed {self.seed}: {self.form}, {self.dtype_q} and {self.dtype_kv}, {given}"

    def _compare(self, out: np.ndarray, lse: np.ndarray | None) -> None:
        is_even = out.ndim == 4
        used = self._used()
        ends, near = np.cumsum(self.q_lens), 2e-5 if self.dtype == np.float32 else 3e-2
        near_lse = 1e-2 if self.is_gpu else 1e-5
        for index, end in enumerate(ends):
            begin = end - self.q_lens[index]
            q, (k, v) = self.q[begin : begin + used[index]], self._keys_of(index)
            of_q, of_k, of_v = self.descales[:, index]
            group = self.heads // self.kv_heads
            q = q.astype(np.float64) * of_q.repeat(group)[:, None] * of_k.repeat(group)[:, None]
            slopes = None if self.slopes is None else self.slopes[index]
            options = dict(self.options)
            if self.are_causal is not None:
                options["causal"] = bool(self.are_causal[index])
            want, want_lse = dense(q, k, v * of_v[:, None], slopes=slopes, **options)
            if self.gate is not None:
                want = want * sigmoid(self.gate[begin : begin + used[index]])
            own = out[index] if is_even else out[begin:end]
            np.testing.assert_allclose(
                own[: used[index]], want, near, near, err_msg=f"{self}, request {index}"
            )
            if lse is not None:
                own = lse[index] if is_even else lse[:, begin:end]
                np.testing.assert_allclose(
                    own[:, : used[index]], want_lse, *(near_lse,) * 2, err_msg=f"{self}, {index}"
                )

    def _keys_of(self, index: int) -> list[np.ndarray]:
        if self.absent[index] if index < len(self.absent) else False:
            return [np.zeros((0, self.kv_heads, dim)) for dim in self._dims()]
        length = self.kv_lens[index]
        added = self.added[index] if index < len(self.added) else [x[:0] for x in self.keys[index]]
        first = self.pads[index] if index < len(self.pads) else 0
        return [
            np.concatenate([x[:length], new])[first:].astype(np.float64)
            for x, new in zip(self.keys[index], added, strict=True)
        ]

    def _check_writes(self) -> None:
        """New keys are where they belong, and nothing else was written."""
        self.assert_intact()
        if not self.new.any():
            return
        for place in range(2):
            want = self.pools[place]
            for index in np.flatnonzero(~self.absent):
                places = self.slots[index][self.kv_lens[index] :]
                for (page, at), row in zip(places, self.added[index][place], strict=False):
                    want[page, at] = row
            # Rounding of a rotation may differ by one step.
            near = (1e-2, 1e-3) if self.unturned else (0.0, 0.0)
            got = poison.download(self.args[1 + place])
            compare.assert_bitwise_equal(got, want, f"{self}: cache", near=near)
