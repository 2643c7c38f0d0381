"""Seeded steps of a serving engine on poisoned pools, and their answers as rows, the paths of
their keys, and what they see of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn import serving
from cupyattn.serving import BackendConfig, BatchInfo, DraftInfo, ForwardMode, LayerSpec

from . import poison
from .plain_answers import dense

KINDS = (
    *("decode", "draft chain", "draft beams", "verify chain", "verify tree"),
    *("extend", "prompt", "mixed", "draft extend", "idle"),
)
_MODES = {
    "decode": ForwardMode.DECODE,
    "draft chain": ForwardMode.DRAFT_DECODE,
    "draft beams": ForwardMode.DRAFT_DECODE,
    "verify chain": ForwardMode.TARGET_VERIFY,
    "verify tree": ForwardMode.TARGET_VERIFY,
    "extend": ForwardMode.EXTEND,
    "prompt": ForwardMode.EXTEND,
    "mixed": ForwardMode.MIXED,
    "draft extend": ForwardMode.DRAFT_EXTEND,
    "idle": ForwardMode.IDLE,
}
_ABSURD = 2_000_000_000


def dense_row(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, window: int, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(out [h, dv], lse [h]) of the row at the end of a path of keys k, v [n, hk, d]."""
    out, lse = dense(q[None], k, v, causal=True, window=(window, 0), **options)
    return out[0], lse[:, 0]


@dataclass
class Pool:
    """The buffers of two layers: 0 of the first pool, 1 of the second."""

    buffers: list[tuple[Any, Any]] = field(default_factory=list)

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        return self.buffers[layer_id]


class Case:
    """A step: a configuration, requests, one layer. `run` answers it and compares."""

    def __init__(
        self,
        seed: int,
        xp: ModuleType = np,
        *,
        kind: str = "",
        is_gpu: bool = False,
        device: str = "cpu",
        is_long: bool = False,
    ) -> None:
        """is_gpu: what kernels take, in half precision. is_long: more keys than a table's early
        part."""
        self.xp, self.seed, self.is_gpu, self.device = xp, seed, is_gpu, device
        self.kind = kind or KINDS[seed % len(KINDS)]
        self.rng = rng = np.random.default_rng((seed, 52))
        self.bs = int(rng.integers(0 if seed % 7 == 3 else 1, 5))
        self._choose_heads()
        self.dtype = np.dtype("float16" if is_gpu else rng.choice(["float32"] * 3 + ["bfloat16"]))
        self.kv_dtype = self.dtype
        if self.dtype != np.float32 and rng.random() < 0.3:
            self.kv_dtype = np.dtype(ml_dtypes.float8_e4m3fn)
        self.page = int(rng.choice([1, 1, 4, 8]))
        self.columns = 1024 if is_long else int(rng.choice([64, 96]))
        self._choose_config()
        self._make_requests()
        self._choose_layer()
        self._place()
        self.real = self.bs

    def pad(self, count: int) -> None:
        """Add requests as graphs have them: of one key, in the first one's row of the pool."""
        rows = 0 if self.kind == "draft extend" else self.q_lens[0]
        for name, x in (("req", self.req[0]), ("lens", 1), ("q_lens", rows), ("encoder", 0)):
            values = getattr(self, name)
            setattr(self, name, np.concatenate([values, np.full(count, x, values.dtype)]))
        self.tree = np.concatenate([self.tree[: self.bs], self.tree[:1].repeat(count, 0)])
        self.bs += count

    # --- what an engine has ---

    def _choose_heads(self) -> None:
        rng = self.rng
        self.kv_heads = int(rng.integers(1, 3))
        self.heads = self.kv_heads * int(rng.integers(1, 4))
        self.dim, self.dim_v = (
            (64, 64) if self.is_gpu else (int(rng.choice([16, 24])) for _ in "kv")
        )

    def _choose_config(self) -> None:
        rng = self.rng
        self.topk = int(rng.integers(2, 5)) if self.kind in ("draft beams", "verify tree") else 1
        self.num_steps = int(rng.integers(1, 5))
        self.step = int(rng.integers(0, self.num_steps))
        self.drafts = int(rng.integers(1, 9))
        self.window = int(rng.integers(0, 12)) if rng.random() < 0.5 else None
        self.chunk = int(rng.choice([4, 8, 16, 24])) if rng.random() < 0.4 else None
        if self.chunk and not self.is_gpu and rng.random() < 0.3:
            self.chunk = int(rng.integers(1, 20))
        can_share = self.chunk is None or self.chunk % self.page == 0
        has_others = self.window is not None or self.chunk is not None
        self.is_hybrid = bool(has_others and can_share and rng.random() < 0.4)
        self.has_encoder = not self.is_hybrid and rng.random() < 0.25
        self._make_config()

    def _make_config(self) -> None:
        rng = self.rng
        deterministic = bool(rng.random() < 0.2)
        self._set_config(
            deterministic=deterministic,
            attention_chunk_size=self.chunk,
            sliding_window_size=self.window,
            is_hybrid=self.is_hybrid,
            has_encoder=self.has_encoder,
            tree_form="expand" if rng.random() < 0.4 else "mask",
        )

    def _set_config(self, **named: Any) -> None:
        self.config = BackendConfig(
            self.heads,
            self.kv_heads,
            self.dim,
            v_head_dim=self.dim_v,
            page_size=self.page,
            max_context_len=self.columns,
            q_dtype=self.dtype.name,
            kv_dtype=self.kv_dtype.name,
            topk=self.topk,
            num_draft_steps=self.num_steps,
            num_draft_tokens=self.drafts,
            **named,
        )

    def _make_requests(self) -> None:
        rng, bs = self.rng, self.bs
        self.encoder = np.zeros(bs, np.int64)
        if self.has_encoder:
            self.encoder = rng.integers(0, 12, bs)
        self.lens = rng.integers(1, 40, bs)
        if self.columns > 100:
            self.lens += rng.integers(300, 800, bs)
        is_prompt = self.kind == "prompt"
        share = rng.random(bs)
        self.q_lens = np.ones(bs, np.int64)
        if _MODES[self.kind].is_ragged:
            self.q_lens = np.maximum(1, (share * self.lens).astype(np.int64))
            if is_prompt:
                self.q_lens = self.lens.copy()
            if self.kind == "mixed":
                self.q_lens[rng.random(bs) < 0.5] = 1
            if self.kind == "draft extend":
                self.q_lens = np.minimum(rng.integers(0, 5, bs), self.lens)
        elif self.kind == "verify chain" or self.kind == "verify tree":
            self.q_lens[:] = self.drafts
        elif self.kind == "draft beams":
            self.q_lens[:] = self.topk
        # Keys that a request has in its row of the pool, drafts among them.
        self.extra = 0
        if self.kind == "draft chain":
            self.extra = self.step + 1
        elif self.kind.startswith("verify"):
            self.extra = self.drafts
        self.tree = np.stack([self._tree() for _ in range(bs)] or [np.ones((1, 1), bool)])

    def _tree(self) -> np.ndarray:
        """What each of D tokens sees: itself and its ancestors."""
        n = self.drafts
        seen = np.eye(n, dtype=bool)
        for token in range(1, n):
            seen[token] |= seen[self.rng.integers(0, token)]
        return seen

    def _choose_layer(self) -> None:
        rng = self.rng
        kinds = ["full"]
        kinds += ["window"] * (self.window is not None) + ["chunk"] * (self.chunk is not None)
        kinds += ["cross"] * self.has_encoder
        self.layer_kind = str(rng.choice(kinds))
        branches = self.topk > 1
        self.in_swa = self.is_hybrid and (
            self.layer_kind == "chunk"
            or (self.layer_kind == "window" and (branches or rng.random() < 0.7))
        )
        self.left = -1
        if self.layer_kind == "window":
            assert self.window is not None
            self.left = int(rng.integers(0, self.window + 1))
            if rng.random() < 0.5:
                self.left = self.window
        self.layer_chunk = int(self.chunk or 0) if self.layer_kind == "chunk" else 0
        self.softcap = float(rng.uniform(0.5, 4)) if rng.random() < 0.3 else 0.0
        self.scale = float(rng.uniform(0.05, 0.5)) if rng.random() < 0.5 else None
        self.sinks = rng.normal(0, 2, self.heads).astype(np.float32) if rng.random() < 0.4 else None
        self.k_scale = self.v_scale = np.ones(self.kv_heads, np.float32)
        self.has_scales = self.kv_dtype != self.dtype and rng.random() < 0.7
        if self.has_scales:
            self.k_scale, self.v_scale = (
                rng.uniform(0.3, 2, self.kv_heads).astype(np.float32) for _ in "kv"
            )

    # --- memory ---

    def _place(self) -> None:
        rng, bs, page = self.rng, self.bs, self.page
        total = self.encoder + self.lens + self.extra
        pages = [-(-int(n) // page) for n in total]
        beams = bs * self.topk * self.num_steps if self.kind == "draft beams" else 0
        num_pages = sum(pages) + -(-beams // page) + 3
        order = rng.permutation(num_pages)
        self.num_slots = num_pages * page
        rows = rng.permutation(bs + 2)
        self.req = rows[:bs]
        table = np.full((bs + 2, self.columns), _ABSURD, np.int32)
        self.slots: list[np.ndarray] = []
        used = 0
        for index in range(bs):
            own = order[used : used + pages[index]]
            used += pages[index]
            slots = (own[:, None] * page + np.arange(page)).reshape(-1)[: total[index]]
            table[self.req[index], : len(slots)] = slots
            self.slots.append(slots)
        spare = (order[used:, None] * page + np.arange(page)).reshape(-1)
        shape = (bs, self.topk, self.num_steps) if beams else (0, 1, 1)
        self.beam_slots = rng.permutation(spare)[:beams].reshape(shape)
        self.table = table
        self._fill_pools()

    def _fill_pools(self) -> None:
        rng = self.rng
        shape = self.num_slots, self.kv_heads
        values = [rng.standard_normal((*shape, dim)).astype(self.kv_dtype) for dim in self._dims()]
        self.full_to_swa = rng.permutation(self.num_slots).astype(rng.choice([np.int32, np.int64]))
        if self.page > 1:
            # Pages stay pages in the second pool.
            own = rng.permutation(self.num_slots // self.page)
            where = own[:, None] * self.page + np.arange(self.page)
            self.full_to_swa = where.reshape(-1).astype(self.full_to_swa.dtype)
        self.values = values
        self.live = np.zeros(self.num_slots, bool)
        # Tokens of later steps are not there yet.
        for slots in (*self.slots, self.beam_slots[..., : self.step + 1].reshape(-1)):
            self.live[slots] = True

    def _dims(self) -> tuple[int, int]:
        return self.dim, self.dim_v

    def put(self, x: np.ndarray) -> Any:
        return poison.embed(np.ascontiguousarray(x), xp=self.xp, device=self.device).array

    def pool(self) -> Pool:
        made = Pool()
        for layer in range(2):
            pair = []
            for x in self.values:
                own = np.full(x.shape, np.nan, np.float32).astype(self.kv_dtype)
                if layer == 0:
                    own[self.live] = x[self.live]
                else:
                    own[self.full_to_swa[self.live]] = x[self.live]
                pair.append(self.put(own))
            made.buffers.append((pair[0], pair[1]))
        return made

    # --- the call ---

    def backend(self) -> serving.AttentionBackend:
        full_to_swa = self.put(self.full_to_swa) if self.is_hybrid else None
        return serving.AttentionBackend(self.config, self.pool(), self.put(self.table), full_to_swa)

    def multi_step(self) -> serving.MultiStepDraftBackend:
        full_to_swa = self.put(self.full_to_swa) if self.is_hybrid else None
        return serving.MultiStepDraftBackend(
            self.config, self.pool(), self.put(self.table), full_to_swa
        )

    def batch(self) -> BatchInfo:
        rng, mode = self.rng, _MODES[self.kind]
        self.beam_rows = None
        kinds = [np.int32, np.int64]
        made = BatchInfo(
            mode,
            self.put(self.req.astype(rng.choice(kinds))),
            self.put(self.lens.astype(rng.choice(kinds))),
            self.lens if rng.random() < 0.7 else None,
        )
        if mode.is_ragged:
            made.extend_seq_lens_host = self.q_lens
            if rng.random() < 0.6:
                made.extend_seq_lens = self.put(self.q_lens.astype(rng.choice(kinds)))
        if self.has_encoder:
            made.encoder_lens = self.put(self.encoder.astype(rng.choice(kinds)))
        if mode in (ForwardMode.DRAFT_DECODE, ForwardMode.TARGET_VERIFY):
            made.draft = DraftInfo(step=self.step)
            made.draft.num_real = None if self.real == self.bs else self.real
        if self.kind == "draft beams":
            made.out_cache_loc = self.put(self.beam_slots.astype(rng.choice(kinds)))
            if rng.random() < 0.3 and self.real == self.bs:
                self.beam_rows = rng.integers(0, self.topk, self.beam_slots.shape).astype(np.int32)
                assert made.draft is not None
                flat = self.beam_rows.reshape(-1, self.num_steps)
                made.draft.beam_rows = self.put(flat)
        if self.kind == "verify tree":
            assert made.draft is not None
            made.draft.tree_mask = self._mask()
        return made

    def batch_of_one_key(self) -> BatchInfo:
        """A batch of the same size whose requests all have one key."""
        batch = self.batch()
        batch.seq_lens = self.put(np.ones(self.bs, np.int64))
        batch.seq_lens_host = None
        if batch.encoder_lens is not None:
            batch.encoder_lens = self.put(np.zeros(self.bs, np.int32))
        if batch.mode.is_ragged:
            batch.extend_seq_lens_host = np.ones(self.bs, np.int64)
            batch.extend_seq_lens = self.put(np.ones(self.bs, np.int32))
        if batch.draft is not None and batch.draft.tree_mask is not None:
            batch.draft.tree_mask = self.put(self.tree[: self.bs])
        return batch

    beam_rows: np.ndarray | None = None

    def _mask(self) -> Any:
        tree = self.tree[: self.bs]
        form = self.rng.integers(3)
        if form == 0:
            return self.put(tree)
        if form == 1:
            words = (tree.astype(np.uint64) << np.arange(self.drafts, dtype=np.uint64)).sum(-1)
            kind = np.int64 if self.xp.__name__ == "torch" else np.uint64
            return self.put(words.astype(np.uint64).view(kind))
        rows = [
            np.concatenate([np.ones((self.drafts, n), bool), own], axis=1).reshape(-1)
            for n, own in zip(self.lens[: self.real], tree[: self.real], strict=True)
        ]
        return self.put(np.concatenate(rows) if rows else np.zeros(0, bool))

    def layer(self) -> LayerSpec:
        scales: dict[str, Any] = {}
        if self.has_scales:
            scales = {"k_scale": self.put(self.k_scale), "v_scale": self.put(self.v_scale)}
        return LayerSpec(
            int(self.in_swa),
            softmax_scale=self.scale,
            softcap=self.softcap,
            window_size=(self.left, 0) if self.layer_kind == "window" else (-1, -1),
            attention_chunk=self.layer_chunk,
            is_cross_attention=self.layer_kind == "cross",
            sinks=None if self.sinks is None else self.put(self.sinks),
            uses_swa_pool=self.in_swa,
            **scales,
        )

    def capture(self, max_bs: int = 8) -> tuple[serving.AttentionBackend, Any]:
        """A backend with memory for graphs, and metadata of a graph for a batch of this size."""
        mode = _MODES[self.kind]
        backend = self.backend()
        rows = max(4, self.drafts, self.topk)
        modes = (ForwardMode.DECODE,) if mode is ForwardMode.IDLE else (mode,)
        if self.kind in ("draft beams", "draft chain"):
            backend.step = self.step
        backend.init_graph_state(max_bs, max_bs * rows, modes)
        tokens = self.bs * (rows if mode.is_ragged else int(self.q_lens[0]))
        return backend, backend.init_forward_metadata_capture(self.bs, tokens, modes[0])

    def queries(self) -> np.ndarray:
        rows = int(self.q_lens.sum())
        return self.rng.standard_normal((rows, self.heads, self.dim)).astype(self.dtype)

    def run(self) -> None:
        backend, layer = self.backend(), self.layer()
        backend.init_forward_metadata(self.batch())
        self.answer_and_check(backend, layer)

    def answer_and_check(self, backend: serving.AttentionBackend, layer: LayerSpec) -> None:
        q = self.queries()
        out, given = None, self.rng.random() < 0.5
        if given:
            out = poison.blank(
                (len(q), self.heads, self.dim_v), self.dtype, xp=self.xp, device=self.device
            )
        layout = "ht" if self.rng.random() < 0.5 else "th"
        options = {"return_lse": True, "lse_layout": layout}
        target = None if out is None else out.array
        answer, lse = self.forward(backend, q, layer, target, **options)
        lse = poison.download(lse)
        if out is not None:
            out.assert_intact("out")
            if self.bs:
                answer = out.array
        self.check(q, poison.download(answer), lse.T if layout == "ht" else lse)

    def forward(self, backend: Any, q: np.ndarray, layer: LayerSpec, out: Any, **kw: Any) -> Any:
        return backend.forward(self.put(q), layer, None, out, **kw)

    # --- the oracle ---

    def paths(self) -> list[tuple[int, np.ndarray]]:
        """(request, slots of the keys up to its own) of each row of q."""
        found = []
        for index in range(self.real):
            encoder = int(self.encoder[index])
            slots, n = self.slots[index][encoder:], int(self.lens[index])
            for row in range(int(self.q_lens[index])):
                if self.kind == "draft beams":
                    steps = np.arange(self.step + 1)
                    who = np.full(len(steps), row)
                    if self.beam_rows is not None:
                        who = self.beam_rows[index, row, : len(steps)]
                    path = np.concatenate([slots[:n], self.beam_slots[index, who, steps]])
                elif self.kind == "verify tree":
                    tokens = np.flatnonzero(self.tree[index, row])
                    path = np.concatenate([slots[:n], slots[n + tokens]])
                else:
                    end = n + self.extra - int(self.q_lens[index]) + row
                    path = slots[: end + 1]
                if self.layer_kind == "cross":
                    path = self.slots[index][:encoder]
                found.append((index, path))
        return found

    def check(self, q: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
        scale = 1 / math.sqrt(self.dim) if self.scale is None else self.scale
        is_cross = self.layer_kind == "cross"
        paths = self.paths()
        out, lse = out[: len(paths)], lse[: len(paths)]
        wanted, wanted_lse = np.zeros(out.shape), np.zeros(lse.shape)
        k, v = (x.astype(np.float64) for x in self.values)
        k, v = k * self.k_scale[:, None], v * self.v_scale[:, None]
        for row, (_, path) in enumerate(paths):
            wanted[row], wanted_lse[row] = dense_row(
                q[row],
                k[path],
                v[path],
                scale=scale,
                softcap=self.softcap,
                window=-1 if is_cross else self.left,
                chunk=0 if is_cross else self.layer_chunk,
                sinks=self.sinks,
            )
        near = (1e-5, 2e-6) if self.dtype == np.float32 else (0.02, 0.02)
        label = f"seed {self.seed}, {self.kind}, {self.layer_kind}"
        np.testing.assert_allclose(out.astype(np.float64), wanted, *near, err_msg=label)
        near = (0.01, 0.01) if self.is_gpu else (1e-5, 1e-5)
        np.testing.assert_allclose(lse, wanted_lse, *near, err_msg=f"lse of {label}")


@dataclass
class LatentPool:
    """One layer of latent rows, in one array or in two."""

    parts: tuple[Any, Any]

    def get_latent_buffers(self, layer_id: int) -> tuple[Any, Any]:
        return self.parts

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.parts[0]


class LatentCase(Case):
    """A step of an engine whose pool has latent rows; queries are absorbed."""

    def _choose_heads(self) -> None:
        rng = self.rng
        self.kv_heads, self.heads = 1, int(rng.choice([1, 3, 8, 16]))
        self.dim_v = 512 if self.is_gpu else int(rng.choice([256, 512]))
        self.dim = self.dim_v + 64

    def _make_config(self) -> None:
        rng = self.rng
        self.chunk = None
        self.is_hybrid = self.has_encoder = False
        self.is_split = bool(rng.random() < 0.4)
        deterministic = bool(rng.random() < 0.2)
        self._set_config(use_mla=True, deterministic=deterministic, sliding_window_size=self.window)

    def _choose_layer(self) -> None:
        super()._choose_layer()
        self.softcap, self.scale = 0.0, float(self.rng.uniform(0.02, 0.1))
        self.v_scale = self.k_scale = self.k_scale[:1]

    def _fill_pools(self) -> None:
        super()._fill_pools()
        self.values[1] = self.values[0][..., : self.dim_v]

    def pool(self) -> Any:
        rows = np.full(self.values[0].shape, np.nan, np.float32).astype(self.kv_dtype)
        rows[self.live] = self.values[0][self.live]
        if not self.is_split:
            return LatentPool((self.put(rows), None))
        return LatentPool((self.put(rows[..., : self.dim_v]), self.put(rows[..., self.dim_v :])))

    def layer(self) -> LayerSpec:
        scale: Any = None
        if self.has_scales:
            scale = self.put(self.k_scale) if self.rng.random() < 0.5 else float(self.k_scale[0])
        sinks = None if self.sinks is None else self.put(self.sinks)
        window = (self.left, 0) if self.layer_kind == "window" else (-1, -1)
        return LayerSpec(
            0, softmax_scale=self.scale, k_scale=scale, sinks=sinks, window_size=window
        )

    def forward(self, backend: Any, q: np.ndarray, layer: LayerSpec, out: Any, **kw: Any) -> Any:
        if self.rng.random() < 0.5:
            return super().forward(backend, q, layer, out, **kw)
        latent, rope = self.put(q[..., : self.dim_v]), self.put(q[..., self.dim_v :])
        return backend.forward(latent, layer, None, out, q_rope=rope, **kw)
