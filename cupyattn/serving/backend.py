"""The attention backend of a serving engine: metadata of a step once, then every layer over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes, parse
from ..core.observed import Observed
from ..core.parse import require_int
from ..core.tracing import untraced
from ..errors import ArgumentError, PlanError
from ..flash_attn.api import flash_attn_varlen_func
from ..launch.driver.enqueue import cuda
from .attend import LSE_LAYOUTS, Cache, Workspace, attend, calls_of
from .latent import (
    check_queries,
    dims_of,
    latent_buffers,
    latent_calls_of,
    view_latent_pages,
)
from .metadata import ForwardMetadata
from .modes import BackendConfig, BatchInfo, ForwardMode, LayerSpec
from .pools import require_kv_dtype, view_pages
from .store import StepForm, Store, Tables, form_of, view_tables

_MAX_FORMS = 64
_MAX_LAYERS = _MAX_RECENT = 1024
_WORKSPACE_BYTES = 64 << 20
_UNSIGNED = {
    np.dtype(f"{kind}{size}"): np.dtype(f"u{size}") for kind in "iu" for size in (1, 2, 4, 8)
}


class AttentionBackend(Observed):
    """Attention of all layers of an engine, on torch, CuPy or NumPy arrays.

    Parameters
    ----------
    config
        See BackendConfig.
    pool
        Keys and values, see KVPool; with is_hybrid it knows which layers are in the second pool, as
        LayerSpec does.
    req_to_token
        int32 [max_reqs, columns]: the slot of each token of a request.
    full_to_swa
        int32 or int64 [slots]: with is_hybrid, the slot of the second pool for each one.
    step
        Which draft step this backend is of, if DraftInfo does not say.

    Notes
    -----
    `init_forward_metadata` enqueues one launch; metadata holds until the next one. In a captured
    graph `init_graph_state`, `init_forward_metadata_capture` and `init_forward_metadata_replay` are
    used instead: replays write the same memory. Nothing is read from the device anywhere. All calls
    work on the current stream of the arrays' framework, and order each other by it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import serving
    >>> req_to_token = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
    >>> pool = serving.MHATokenToKVPool(4 * 64, 2, 64, 1, req_to_token, dtype="float16")
    >>> config = serving.BackendConfig(8, 2, 64, page_size=16, max_context_len=64)
    >>> backend = serving.AttentionBackend(config, pool, req_to_token)
    >>> lengths, rows = np.array([7, 3]), np.array([3, 0])  # keys, and rows of req_to_token
    >>> mode = serving.ForwardMode.EXTEND
    >>> batch = serving.BatchInfo(mode, rows, lengths, extend_seq_lens_host=lengths)
    >>> _ = backend.init_forward_metadata(batch)  # once a step
    >>> layer = serving.LayerSpec(layer_id=0)
    >>> slots = np.r_[req_to_token[3, :7], req_to_token[0, :3]]
    >>> q, k = np.ones((10, 8, 64), np.float16), np.ones((10, 2, 64), np.float16)
    >>> backend.write_kv(layer, slots, k, k)  # once a layer
    >>> backend.forward_extend(q, layer).shape
    (10, 8, 64)
    """

    def __init__(
        self,
        config: BackendConfig,
        pool: Any,
        req_to_token: Any,
        full_to_swa: Any = None,
        *,
        step: int = 0,
    ) -> None:
        self.config, self.pool, self.step = config, pool, require_int(step, "step", 0)
        self._tables: Tables = view_tables(config, req_to_token, full_to_swa)
        self._stores: dict[StepForm, Store] = {}
        # By mode, the most query tokens of a request, and the draft step.
        self._recent: dict[tuple[ForwardMode, int, int], Store] = {}
        self._graph_stores: dict[ForwardMode, Store] = {}
        self._graph_bs = 0
        self._workspace = Workspace()
        self._pages: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}
        self.forward_metadata: ForwardMetadata | None = None

    # --- metadata ---

    @untraced
    def init_forward_metadata(self, batch: BatchInfo) -> ForwardMetadata:
        """The metadata of a batch, for the forward calls that follow.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays of other shapes, dtypes and devices and for lengths that the
            host knows to be beyond max_context_len; on the CPU for any value that makes no sense.
        """
        bs = self._check(batch)
        store = self._store_for(batch, bs)
        store.write(batch, bs)
        return self._use(store, bs, self._step(batch), batch)

    def _store_for(self, batch: BatchInfo, bs: int, in_graph: bool = False) -> Store:
        """The memory of a batch; in_graph: what graphs keep."""
        if in_graph:
            return self._graph_store(batch.mode, bs)
        max_rows, step = _max_rows(batch), self._step(batch)
        key = batch.mode, max_rows, step
        store = self._recent.get(key)
        if store is None or store.capacity < bs:
            form = form_of(self.config, batch.mode, max_rows, step)
            store = self._stores.get(form)
            if store is None or store.capacity < bs:
                store = self._make_store(form, bs)
            if len(self._recent) >= _MAX_RECENT:
                self._recent.clear()
            self._recent[key] = store
        return store

    def _make_store(self, form: StepForm, bs: int) -> Store:
        if self._is_capturing():
            raise PlanError(
                "init_forward_metadata: memory for this mode cannot be made while a graph is "
                "captured; call it once before, or init_graph_state"
            )
        if len(self._stores) >= _MAX_FORMS:
            self._stores.clear()
            self._recent.clear()
        store = self._stores[form] = _store_of(self.config, form, bs, self._tables)
        return store

    def _use(self, store: Store, bs: int, step: int, batch: BatchInfo) -> ForwardMetadata:
        meta = store.metadata(bs, step)
        meta.batch = batch
        self.forward_metadata = meta
        return meta

    def _step(self, batch: BatchInfo) -> int:
        if batch.mode is not ForwardMode.DRAFT_DECODE:
            return 0
        return self.step if batch.draft is None else max(self.step, batch.draft.step)

    def _check(self, batch: BatchInfo) -> int:
        """The batch size, once the host's part of the batch is checked."""
        mode = batch.mode
        if not isinstance(mode, ForwardMode):
            raise ArgumentError(f"mode: got {parse.shown(mode)}; wanted a ForwardMode")
        shape: Any = getattr(batch.seq_lens, "shape", None)
        if shape is None:
            shape = array.view(batch.seq_lens, "seq_lens").shape
        if len(shape) != 1:
            raise ArgumentError(f"seq_lens: shape is {list(shape)}; wanted [bs]")
        bs = shape[0]
        if mode is ForwardMode.DRAFT_DECODE:
            step = self._step(batch)
            if self.config.num_draft_steps and step >= self.config.num_draft_steps:
                raise ArgumentError(
                    f"step: got {step}; the backend has num_draft_steps "
                    f"{self.config.num_draft_steps}"
                )
        if batch.seq_lens_host is not None:
            self._check_on_host(batch.seq_lens_host, "seq_lens_host", bs)
        if batch.encoder_lens_host is not None:
            self._check_on_host(batch.encoder_lens_host, "encoder_lens_host", bs)
        if batch.extend_seq_lens_host is not None:
            self._check_on_host(batch.extend_seq_lens_host, "extend_seq_lens_host", bs)
        elif mode.is_ragged:
            if batch.max_extend_len is None or batch.extend_seq_lens is None:
                raise ArgumentError(
                    "extend_seq_lens_host: got None; wanted the query tokens of each request, or "
                    "extend_seq_lens with max_extend_len"
                )
            require_int(batch.max_extend_len, "max_extend_len", 0)
        if mode.is_ragged and batch.extend_seq_lens is None and bs:
            lens = np.asarray(batch.extend_seq_lens_host, np.int32)
            batch.extend_seq_lens = array.from_numpy(lens, self._tables.req_to_token)
        return bs

    def _check_on_host(self, lens: Any, name: str, bs: int) -> None:
        numbers = np.asarray(lens)
        unsigned = _UNSIGNED.get(numbers.dtype)
        if numbers.shape != (bs,) or unsigned is None:
            raise ArgumentError(
                f"{name}: {numbers.dtype} of shape {list(numbers.shape)}; wanted integers [{bs}]"
            )
        # Negative numbers are large ones without a sign, so that one pass finds both.
        if bs and np.maximum.reduce(numbers.view(unsigned)) > self.config.max_context_len:
            raise ArgumentError(
                f"{name}: {numbers.tolist()[:8]}; wanted lengths from 0 to max_context_len, "
                f"{self.config.max_context_len}"
            )

    # --- graphs ---

    def init_graph_state(
        self, max_bs: int, max_num_tokens: int, modes: tuple[ForwardMode, ...] | None = None
    ) -> None:
        """Memory for graphs of up to max_bs requests and max_num_tokens query tokens.

        modes: those that will be captured; default: DECODE, and with drafts configured
        DRAFT_DECODE, TARGET_VERIFY and DRAFT_EXTEND.
        """
        max_bs = require_int(max_bs, "max_bs")
        max_num_tokens = require_int(max_num_tokens, "max_num_tokens", max_bs)
        config = self.config
        if modes is None:
            modes = (ForwardMode.DECODE,)
            if config.num_draft_steps:
                modes += (ForwardMode.DRAFT_DECODE,)
            if config.num_draft_tokens:
                modes += ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
        self._graph_bs = max_bs
        for mode in modes:
            if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
                raise ArgumentError(f"modes: {mode.name} has no graph; its shapes differ each time")
            form = self._graph_form(mode, -(-max_num_tokens // max_bs))
            self._graph_stores[form.mode] = Store(config, form, max_bs, self._tables)
        self._workspace = self._make_workspace(max_num_tokens)

    def _graph_form(self, mode: ForwardMode, max_rows: int) -> StepForm:
        return form_of(self.config, mode, max_rows, self.step)

    def _make_workspace(self, max_num_tokens: int) -> Workspace:
        """torch gives captured graphs memory of their own; others need it from here."""
        v = self._tables.req_to_token
        if v.device.kind == "cpu" or v.framework == "torch":
            return Workspace()
        return Workspace(array.empty((_WORKSPACE_BYTES,), dtypes.uint8, v), max_num_tokens)

    def graph_num_bytes(self) -> int:
        """Device memory of all graphs' metadata."""
        return sum(store.num_bytes for store in self._graph_stores.values())

    def init_forward_metadata_capture(
        self, bs: int, num_tokens: int, mode: ForwardMode, batch: BatchInfo | None = None
    ) -> ForwardMetadata:
        """The metadata that a graph of bs requests will read: captured calls use its memory.

        batch: what is written there; default: until the first replay it is of requests of one key.
        """
        store = self._graph_store(mode, bs)
        rows, max_tokens = store.form.rows, bs * store.form.max_rows
        if (rows and num_tokens != max_tokens) or num_tokens > max_tokens:
            raise ArgumentError(
                f"num_tokens: got {num_tokens}; {bs} requests of {mode.name} have {max_tokens}"
            )
        if batch is not None:
            return self.init_forward_metadata_replay(bs, batch)
        meta = store.metadata(bs, store.form.first_step)
        self.forward_metadata = meta
        return meta

    @untraced
    def init_forward_metadata_replay(self, bs: int, batch: BatchInfo) -> ForwardMetadata:
        """Write a batch into the memory of the graph of bs requests: one launch.

        Padded requests have sequence length `graph_seq_len_fill_value()`.
        """
        store = self._graph_store(batch.mode, bs)
        self._check_padded(batch, bs)
        if not store.form.rows and _max_rows(batch) > store.form.max_rows:
            raise ArgumentError(
                f"extend_seq_lens_host: a request has {_max_rows(batch)} query tokens; the graph "
                f"was captured for {store.form.max_rows}"
            )
        store.write(batch, bs)
        return self._use(store, bs, store.form.first_step, batch)

    def _graph_store(self, mode: ForwardMode, bs: int) -> Store:
        if mode is ForwardMode.IDLE:
            mode = ForwardMode.DECODE
        store = self._graph_stores.get(mode)
        if store is None:
            raise PlanError(f"mode: {mode!r} has no memory for graphs; call init_graph_state first")
        _require_room(store, bs)
        return store

    def _check_padded(self, batch: BatchInfo, bs: int) -> None:
        if self._check(batch) != bs:
            raise ArgumentError(
                f"seq_lens: holds {batch.seq_lens.shape[0]} requests; the graph has {bs}, pad them"
            )

    def graph_seq_len_fill_value(self) -> int:
        """What a padded request has for a sequence length."""
        return 1

    # --- layers ---

    _attend: ClassVar[Callable[..., Any]] = staticmethod(attend)

    def write_kv(
        self, layer: LayerSpec, loc: Any, k: Any, v: Any = None, k_rope: Any = None
    ) -> None:
        """Write new keys and values to slots of the pool: one launch.

        Parameters
        ----------
        layer
            Whose keys these are.
        loc
            Slots of the new tokens, [n].
        k, v
            [n, num_kv_heads, head_dim] and [n, num_kv_heads, v_head_dim].
        k_rope
            With use_mla, the rope columns that k lacks. There k is [n, 1, columns], of both parts
            or of the latent one, and v is not read.

        Raises
        ------
        CupyAttnError
            ArgumentError where v is missing.
        """
        if k_rope is not None:
            self.pool.set_mla_kv_buffer(layer, loc, k, k_rope)
        elif v is None and not self.config.use_mla:
            raise ArgumentError("v: got None; wanted values with the keys, or use_mla configured")
        else:
            self.pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)

    def forward_decode(self, q: Any, layer: LayerSpec, **options: Any) -> Any:
        """`forward` of a batch in which all requests have equally many query tokens."""
        return self.forward(q, layer, **options)

    def forward_extend(self, q: Any, layer: LayerSpec, **options: Any) -> Any:
        """`forward` of any batch."""
        return self.forward(q, layer, **options)

    @untraced
    def forward(
        self,
        q: Any,
        layer: LayerSpec,
        meta: ForwardMetadata | None = None,
        out: Any = None,
        *,
        q_rope: Any = None,
        return_lse: bool = False,
        lse_layout: str = "ht",
    ) -> Any:
        """Attention of a layer over the keys of the pool.

        Parameters
        ----------
        q
            [tokens, num_q_heads, head_dim], request after request. With use_mla absorbed queries,
            latent columns first; or the latent ones alone, v_head_dim of them.
        q_rope
            With use_mla, the rope columns that q lacks: [tokens, num_q_heads, head_dim -
            v_head_dim].
        layer
            Its heads, head dims, window, caps and scales.
        meta
            Default: that of the last init_forward_metadata.
        out
            [tokens, num_q_heads, v_head_dim] to write instead of a new array.
        return_lse
            Also give the LSE: natural logarithms, float32, sinks included, -inf where a row sees no
            key.
        lse_layout
            "ht": [num_q_heads, tokens]; "th": [tokens, num_q_heads].

        Returns
        -------
        result
            out, or (out, lse).

        Raises
        ------
        CupyAttnError
            ArgumentError, UnsupportedError, before any launch.
        """
        meta = self.forward_metadata if meta is None else meta
        if meta is None:
            raise PlanError("forward: there is no metadata yet; call init_forward_metadata first")
        if return_lse is not False:
            return_lse = parse.flag(return_lse, "return_lse")
            parse.choice(lse_layout, LSE_LAYOUTS, "lse_layout")
        config = self.config
        heads = config.shape_of(layer)
        shape: Any = getattr(q, "shape", ())
        if config.use_mla:
            check_queries(q, q_rope, heads)
        elif len(shape) != 3 or shape[1] != heads[0] or shape[2] != heads[2]:
            actual = list(array.view(q, "q").shape)
            raise ArgumentError(f"q: shape is {actual}; wanted [tokens, {heads[0]}, {heads[2]}]")
        elif q_rope is not None:
            raise ArgumentError("q_rope: given without use_mla; pass None, or configure use_mla")
        known = meta.calls.get(id(layer))
        if known is None or known[0] is not layer or known[1] is not config:
            make: Any = latent_calls_of if config.use_mla else calls_of
            known = layer, config, make(config, layer, meta)
            if len(meta.calls) >= _MAX_LAYERS:
                meta.calls.clear()
            meta.calls[id(layer)] = known
        calls = known[2]
        if shape[0] == 0 or meta.batch_size == 0:
            return self._nothing(array.view(q, "q"), heads[3], out, return_lse, lse_layout)
        caches = [self._cache(layer.layer_id, each.page_size, heads) for each in calls]
        return self._attend(calls, q, q_rope, caches, out, return_lse, lse_layout, self._workspace)

    @untraced
    def forward_ragged(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: LayerSpec,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        *,
        causal: bool = True,
        out: Any = None,
        return_lse: bool = False,
        lse_layout: str = "ht",
    ) -> Any:
        """Attention over keys that are not in the pool: of MLA models, prompts unabsorbed.

        Parameters
        ----------
        q
            [tokens, heads, head_dim], request after request.
        k, v
            [keys, KV heads, head_dim] and [keys, KV heads, v_head_dim], likewise.
        layer, out, return_lse, lse_layout
            As in `forward`.
        cu_seqlens_q
            int32 [bs + 1]; default: that of the last metadata of a ragged mode.
        cu_seqlens_k
            Likewise of k; default: cu_seqlens_q.
        max_seqlen_q, max_seqlen_k
            Upper bounds for one request; they affect speed only.
        causal
            True: new tokens over themselves. False: over a chunk of the prefix, in which sinks
            don't count, so that they do once in what is merged. `merge_state_v2` joins the parts.
        """
        if cu_seqlens_q is None:
            meta = self.forward_metadata
            if meta is None or meta.main.cu_seqlens_q is None:
                raise PlanError(
                    "cu_seqlens_q: there is no metadata of a ragged mode; call "
                    "init_forward_metadata first, or pass offsets"
                )
            cu_seqlens_q = meta.main.cu_seqlens_q
            max_seqlen_q = meta.main.max_seqlen_q if max_seqlen_q is None else max_seqlen_q
        if cu_seqlens_k is None:
            cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_q
        parse.choice(lse_layout, LSE_LAYOUTS, "lse_layout")
        result = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale=layer.softmax_scale,
            causal=causal,
            num_splits=int(self.config.deterministic),
            softcap=layer.softcap,
            sinks=layer.sinks if causal else None,
            out=out,
            return_softmax_lse=return_lse,
        )
        if not return_lse or lse_layout == "ht":
            return result
        return result[0], result[1].swapaxes(0, 1)

    def _nothing(
        self, vq: ArrayView, dim_v: int, out: Any, return_lse: bool, lse_layout: str
    ) -> Any:
        """The output of no requests: rows of none are left alone."""
        rows, heads, _ = vq.shape
        if out is None:
            out = array.from_numpy(np.zeros((rows, heads, dim_v), vq.dtype.of_output.numpy), vq)
        if not return_lse:
            return out
        lse = np.full((rows, heads), -np.inf, np.float32)
        return out, array.from_numpy(lse if lse_layout == "th" else lse.T.copy(), vq)

    def _cache(self, layer_id: int, page_size: int, heads: tuple[int, ...]) -> Any:
        """A layer as pages of a size, seen anew where the pool has other arrays."""
        use_mla = self.config.use_mla
        k, v = latent_buffers(self.pool, layer_id) if use_mla else self.pool.get_kv_buffer(layer_id)
        cached = self._pages.get((layer_id, page_size))
        if cached is not None and cached[0] is k and cached[1] is v:
            return cached[2]
        dtype = array.view(k, "k_cache").dtype
        require_kv_dtype(dtype, self.config.kv_dtype)
        if use_mla:
            pages: Any = view_latent_pages(k, v, page_size, dims_of(heads))
        else:
            _, kv_heads, dim_k, dim_v = heads
            pages = Cache(
                view_pages(k, "k_cache", page_size, (kv_heads, dim_k)),
                view_pages(v, "v_cache", page_size, (kv_heads, dim_v)),
                dtype.is_fp8,
                dim_v,
            )
        self._pages[layer_id, page_size] = k, v, pages
        return pages

    def _is_capturing(self) -> bool:
        v = self._tables.req_to_token
        return v.device.kind == "cuda" and cuda().is_capturing(array.current_stream(v))


class MultiStepDraftBackend(Observed):
    """The backends of all steps of a draft, over one store: S steps are prepared by one launch.

    The last step's tokens come from the draft extend that follows, so that steps 0 to S - 2 have
    metadata; `backends` has one for each of the S steps.
    """

    def __init__(
        self, config: BackendConfig, pool: Any, req_to_token: Any, full_to_swa: Any = None
    ) -> None:
        num_steps = require_int(config.num_draft_steps, "num_draft_steps", 1)
        self.config = config
        self.num_prepared = max(1, num_steps - 1)
        self.backends = [
            AttentionBackend(config, pool, req_to_token, full_to_swa, step=step)
            for step in range(num_steps)
        ]
        self._tables = self.backends[0]._tables
        self._form = form_of(config, ForwardMode.DRAFT_DECODE, 1, 0, self.num_prepared)
        self._store: Store | None = None
        self._graph_store: Store | None = None

    def init_forward_metadata(self, batch: BatchInfo) -> list[ForwardMetadata]:
        """The metadata of all prepared steps: one launch."""
        bs = self.backends[0]._check(batch)
        return self._write(self._store_for(bs), batch, bs)

    def init_forward_metadata_step(
        self, step: int, batch: BatchInfo, *, in_graph: bool = False
    ) -> ForwardMetadata:
        """The metadata of one step, over the same memory: one launch.

        For beams that change parents from step to step: `batch.draft.beam_rows` then counts up to
        the column of this step, and the columns behind it name any beams. in_graph: the memory of
        graphs, which a graph of all steps writes once for each.
        """
        bs = self.backends[0]._check(batch)
        if not 0 <= require_int(step, "step", 0) < self.num_prepared:
            raise ArgumentError(
                f"step: got {step}; wanted one of the {self.num_prepared} prepared steps, from 0 on"
            )
        store = self._require_graph_store(bs) if in_graph else self._store_for(bs)
        return self._write(store, batch, bs)[step]

    def _store_for(self, bs: int) -> Store:
        store = self._store
        if store is None or store.capacity < bs:
            store = self._store = _store_of(self.config, self._form, bs, self._tables)
        return store

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory for graphs of up to max_bs requests and max_num_tokens query tokens, all steps."""
        require_int(max_num_tokens, "max_num_tokens", require_int(max_bs, "max_bs"))
        self._graph_store = Store(self.config, self._form, max_bs, self._tables)
        workspace = self.backends[0]._make_workspace(max_num_tokens)
        for backend in self.backends:
            backend._workspace = workspace

    def graph_num_bytes(self) -> int:
        """Device memory of the graphs' metadata."""
        return 0 if self._graph_store is None else self._graph_store.num_bytes

    def init_forward_metadata_capture(self, bs: int) -> list[ForwardMetadata]:
        """The metadata that a graph of bs requests, all steps in it, will read."""
        store = self._require_graph_store(bs)
        return [self._give(store, bs, step) for step in range(self.num_prepared)]

    def init_forward_metadata_replay(self, bs: int, batch: BatchInfo) -> list[ForwardMetadata]:
        """Write a batch into the memory of the graph of bs requests: one launch for all steps."""
        store = self._require_graph_store(bs)
        self.backends[0]._check_padded(batch, bs)
        return self._write(store, batch, bs)

    def _require_graph_store(self, bs: int) -> Store:
        store = self._graph_store
        if store is None:
            raise PlanError("init_graph_state has not been called; graphs need its memory")
        _require_room(store, bs)
        return store

    def _write(self, store: Store, batch: BatchInfo, bs: int) -> list[ForwardMetadata]:
        if batch.mode is not ForwardMode.DRAFT_DECODE:
            raise ArgumentError(f"mode: got {batch.mode!r}; wanted DRAFT_DECODE")
        store.write(batch, bs)
        return [
            self.backends[step]._use(store, bs, step, batch) for step in range(self.num_prepared)
        ]

    def _give(self, store: Store, bs: int, step: int) -> ForwardMetadata:
        meta = store.metadata(bs, step)
        self.backends[step].forward_metadata = meta
        return meta


def _store_of(config: BackendConfig, form: StepForm, bs: int, tables: Tables) -> Store:
    """Memory of a step, which later ones of some more requests fit into."""
    return Store(config, form, 1 << max(0, bs - 1).bit_length(), tables)


def _require_room(store: Store, bs: int) -> None:
    if not 0 < bs <= store.capacity:
        raise ArgumentError(f"bs: got {bs}; init_graph_state was told of {store.capacity}")


def _max_rows(batch: BatchInfo) -> int:
    """The most query tokens of a request of a ragged mode."""
    if not batch.mode.is_ragged:
        return 1
    if batch.extend_seq_lens_host is None:
        return batch.max_extend_len or 1
    return int(np.max(batch.extend_seq_lens_host, initial=1))
