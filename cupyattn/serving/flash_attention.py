"""SGLang's FlashAttentionBackend: its method names and duck-typed arguments over AttentionBackend.

Arguments are what SGLang's ModelRunner, ForwardBatch and RadixAttention have under their names;
nothing of that package is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import array
from ..core import dtypes
from ..core.observed import Observed
from ..core.tracing import untraced
from ..errors import ArgumentError, PlanError, UnsupportedError
from ..flash_attn.attend import float32_sinks
from ..quantize import quantize_qkv
from .backend import AttentionBackend, MultiStepDraftBackend
from .document import FlashAttentionExpandMetadata, FlashAttentionMetadata
from .modes import BackendConfig, BatchInfo, DraftInfo, ForwardMode, LayerSpec
from .store import Store

_MODES = {
    "DECODE": ForwardMode.DECODE,
    "IDLE": ForwardMode.IDLE,
    "TARGET_VERIFY": ForwardMode.TARGET_VERIFY,
    "EXTEND": ForwardMode.EXTEND,
    "MIXED": ForwardMode.MIXED,
    "DRAFT_EXTEND": ForwardMode.DRAFT_EXTEND,
    "DRAFT_DECODE": ForwardMode.DRAFT_DECODE,
}


class FlashAttentionBackend(Observed):
    """Attention of an engine's layers, for model_runner's server.

    Parameters
    ----------
    model_runner
        With req_to_token_pool.req_to_token, token_to_kv_pool, page_size, model_config (context_len,
        attention_arch, is_encoder_decoder), server_args (speculative_eagle_topk,
        speculative_num_draft_tokens, kv_cache_dtype, enable_deterministic_inference),
        sliding_window_size, attention_chunk_size and is_hybrid, as far as they are there.
    skip_prefill
        Accepted for compatibility.
    speculative_step_id, speculative_num_steps
        Of a draft worker.
    topk
        That of the server.
    tree_form
        As in `BackendConfig`.
    fa_impl_ver
        Accepted for compatibility.

    Notes
    -----
    `core` is the AttentionBackend.
    """

    def __init__(
        self,
        model_runner: Any,
        skip_prefill: bool = False,
        speculative_step_id: int = 0,
        topk: int = 0,
        speculative_num_steps: int = 0,
        fa_impl_ver: int = 3,
        *,
        tree_form: str = "mask",
    ) -> None:
        self.config = config_of(model_runner, speculative_num_steps, tree_form)
        pool, table, swa = _memory_of(model_runner, self.config)
        self.core = AttentionBackend(self.config, pool, table, swa, step=speculative_step_id)
        self.skip_prefill, self.fa_impl_ver = skip_prefill, fa_impl_ver
        self.topk, self.page_size = self.config.topk, self.config.page_size
        self.speculative_num_steps = speculative_num_steps
        self.speculative_step_id = speculative_step_id
        self.speculative_num_draft_tokens = self.config.num_draft_tokens
        self.attention_chunk_size = self.config.attention_chunk_size
        self.is_hybrid, self.use_mla = self.config.is_hybrid, self.config.use_mla
        self.num_splits = int(self.config.deterministic)
        self._layers: dict[Any, tuple[tuple[Any, ...], LayerSpec]] = {}
        self._pending: tuple[Store, int, BatchInfo] | None = None
        # Whether queries of 16 bits become e4m3 beside caches of e4m3, by a layer's q_scale.
        self.quantises_queries = False

    # --- what a program may read ---

    @property
    def forward_metadata(self) -> FlashAttentionMetadata | None:
        """The last metadata, under SGLang's names; to read its arrays is to wait for the device."""
        meta = self.core.forward_metadata
        if meta is None:
            return None
        chunk = self.config.attention_chunk_size or 0
        return FlashAttentionMetadata(meta, self.core._tables, self.page_size, chunk)

    @property
    def forward_metadata_spec_decode_expand(self) -> FlashAttentionExpandMetadata | None:
        """The second pass over drafts, `forward_metadata.expand`; None where there is none."""
        meta = self.forward_metadata
        return None if meta is None else meta.expand

    # --- metadata ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """One launch; what follows reads it."""
        self.core.init_forward_metadata(self._batch(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The host's part: which memory a step uses. in_capture: that of graphs."""
        batch, core = self._batch(forward_batch), self.core
        if in_capture:
            batch.seq_lens_host = None  # of a batch made up for the capture: no bound of replays
        bs = core._check(batch)
        store = core._store_for(batch, bs, in_capture)
        core._use(store, bs, store.form.first_step, batch)
        self._pending = store, bs, batch

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The device's part: one launch, which a graph may record."""
        if self._pending is None:
            raise PlanError("init_forward_metadata_in_graph: out_graph has not been called")
        store, bs, batch = self._pending
        store.write(batch, bs)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory for graphs of up to max_bs requests and max_num_tokens query tokens."""
        config = self.config
        rows = max(config.num_draft_tokens, config.num_draft_steps + 1, config.topk)
        max_tokens = (
            max(max_num_tokens, max_bs * rows) if config.num_draft_tokens else max_num_tokens
        )
        self.core.init_graph_state(max_bs, max(max_tokens, max_bs))

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Any,
        seq_lens: Any,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Give the capture of a graph of bs requests its memory, and fill it where that can be."""
        mode = mode_of(forward_mode, spec_info)
        batch: BatchInfo | None = BatchInfo(mode, req_pool_indices[:bs], seq_lens[:bs])
        assert batch is not None
        batch.encoder_lens = None if encoder_lens is None else encoder_lens[:bs]
        batch.draft = self._draft(spec_info, mode)
        if mode is ForwardMode.DRAFT_EXTEND:
            batch.extend_seq_lens_host = np.full(bs, num_tokens // bs)
        is_unknown = (
            mode is ForwardMode.TARGET_VERIFY
            and self.config.has_beams
            and (batch.draft is None or batch.draft.tree_mask is None)
        )
        if is_unknown or (mode is ForwardMode.DRAFT_DECODE and self.config.has_beams):
            batch = None  # the slots of drafts come with the first replay
        self.core.init_forward_metadata_capture(bs, num_tokens, mode, batch)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Any,
        seq_lens: Any,
        seq_lens_sum: int,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Any,
        out_cache_loc: Any = None,
    ) -> None:
        """Write a batch into the memory of the graph of bs requests: one launch.

        seq_lens_sum is not read. Arrays may be longer than bs.
        """
        batch = self._replay_batch(
            bs,
            req_pool_indices,
            seq_lens,
            encoder_lens,
            forward_mode,
            spec_info,
            seq_lens_cpu,
            out_cache_loc,
        )
        self.core.init_forward_metadata_replay(bs, batch)

    def _replay_batch(
        self,
        bs: int,
        req_pool_indices: Any,
        seq_lens: Any,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Any,
        out_cache_loc: Any,
    ) -> BatchInfo:
        mode = mode_of(forward_mode, spec_info)
        batch = BatchInfo(mode, _first(req_pool_indices, bs), _first(seq_lens, bs))
        if seq_lens_cpu is not None:
            batch.seq_lens_host = _first(_host(seq_lens_cpu), bs)
        if encoder_lens is not None:
            batch.encoder_lens = _first(encoder_lens, bs)
        batch.out_cache_loc, batch.draft = out_cache_loc, self._draft(spec_info, mode)
        if mode is ForwardMode.DRAFT_EXTEND:
            batch.extend_seq_lens = spec_info.accept_length[:bs]
            on_host = getattr(spec_info, "accept_length_cpu", None)
            max_rows = max(on_host) + 1 if on_host is not None and len(on_host) else 1
            batch.extend_seq_lens_host = np.full(bs, max_rows)
        return batch

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The sequence length of requests that pad a batch."""
        return self.core.graph_seq_len_fill_value()

    def _batch(self, fb: Any) -> BatchInfo:
        """A ForwardBatch in the core's terms."""
        spec_info = getattr(fb, "spec_info", None)
        mode = mode_of(fb.forward_mode, spec_info)
        on_host = getattr(fb, "seq_lens_cpu", None)
        batch = BatchInfo(mode, fb.req_pool_indices, fb.seq_lens)
        batch.seq_lens_host = None if on_host is None else _host(on_host)
        batch.out_cache_loc = getattr(fb, "out_cache_loc", None)
        batch.encoder_lens = getattr(fb, "encoder_lens", None)
        batch.draft = self._draft(spec_info, mode)
        if mode.is_ragged:
            batch.extend_seq_lens = getattr(fb, "extend_seq_lens", None)
            lens = getattr(fb, "extend_seq_lens_cpu", None)
            batch.extend_seq_lens_host = None if lens is None else _host(lens)
        return batch

    def _draft(self, spec_info: Any, mode: ForwardMode) -> DraftInfo | None:
        if mode not in (ForwardMode.DRAFT_DECODE, ForwardMode.TARGET_VERIFY):
            return None
        draft = DraftInfo(step=self.speculative_step_id)
        if mode is ForwardMode.TARGET_VERIFY and self.config.has_beams:
            draft.tree_mask = getattr(spec_info, "custom_mask", None)
            positions = getattr(spec_info, "positions", None)
            if positions is not None:
                draft.num_real = positions.shape[0] // self.config.num_draft_tokens
        return draft

    # --- layers ---

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Either of the two below, which do the same."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    @untraced
    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Any = None,
        k_rope: Any = None,
        sinks: Any = None,
    ) -> Any:
        """Write k and v, if they are there, and attend.

        Parameters
        ----------
        q
            [tokens, heads * head_dim] or [tokens, heads, head_dim]; returns [tokens, heads *
            v_head_dim].
        k, v
            The new tokens' keys and values, [tokens, KV heads, columns]; None: they are in the
            cache.
        layer, forward_batch
            The engine's own: its RadixAttention and ForwardBatch.
        save_kv_cache
            Write k and v to out_cache_loc first.
        q_rope, k_rope
            Rope columns apart, of an MLA model.
        sinks
            [heads] of any float dtype: natural, unscaled logits.

        Notes
        -----
        Of an MLA model q is absorbed, latent columns first, with q_rope apart or not; k and k_rope
        are what the pool's set_mla_kv_buffer takes. Where the batch says so by
        attn_attend_prefix_cache, q, k and v are unabsorbed: over themselves, or over the chunk of
        the prefix that prefix_chunk_idx names. Then the result is [tokens, heads, v_head_dim], and
        with mha_return_lse (out, lse [tokens, heads]).
        """
        pool = getattr(forward_batch, "token_to_kv_pool", None) or self.core.pool
        use_mla, self.core.pool = self.config.use_mla, pool
        if not use_mla and (q_rope is not None or k_rope is not None):
            raise ArgumentError("q_rope, k_rope: given for a model without MLA; pass None")
        if k is not None:
            if v is None:
                raise ArgumentError("v: got None with k; wanted both, or none")
            if save_kv_cache:
                is_cross = layer.is_cross_attention
                loc = (
                    forward_batch.encoder_out_cache_loc if is_cross else forward_batch.out_cache_loc
                )
                self.core.write_kv(layer, loc, k, v, k_rope)
        spec = self._layer(layer, pool, sinks)
        heads = int(layer.tp_q_head_num)
        if use_mla and self._is_unabsorbed(forward_batch):
            return self._forward_unabsorbed(q, k, v, layer, spec, forward_batch)
        dim, dim_v = int(layer.head_dim), int(getattr(layer, "v_head_dim", layer.head_dim))
        if len(q.shape) != 3:
            q = q.reshape(-1, heads, dim if q_rope is None else dim_v)
        if q_rope is not None and len(q_rope.shape) != 3:
            q_rope = q_rope.reshape(-1, heads, dim - dim_v)
        out = None
        if self.quantises_queries and not use_mla:
            q, out = _quantised(q, pool.get_kv_buffer(layer.layer_id)[0], spec, dim_v)
        out = self.core.forward(q, spec, q_rope=q_rope, out=out)
        return out.reshape(-1, heads * out.shape[-1])

    @staticmethod
    def _is_unabsorbed(forward_batch: Any) -> bool:
        """Whether a batch of an MLA model attends with the heads of its keys."""
        name = getattr(forward_batch.forward_mode, "name", "")
        return getattr(
            forward_batch, "attn_attend_prefix_cache", None
        ) is not None and name not in ("TARGET_VERIFY", "DRAFT_EXTEND")

    def _forward_unabsorbed(
        self, q: Any, k: Any, v: Any, layer: Any, spec: LayerSpec, forward_batch: Any
    ) -> Any:
        fb, dim = forward_batch, int(layer.head_dim)
        heads = int(layer.tp_q_head_num), int(layer.tp_k_head_num)
        q = q.reshape(-1, heads[0], dim)
        k, v = k.reshape(-1, heads[1], dim), v.reshape(-1, heads[1], int(layer.v_head_dim))
        return_lse = bool(getattr(fb, "mha_return_lse", False))
        if not fb.attn_attend_prefix_cache:
            return self.core.forward_ragged(q, k, v, spec, return_lse=return_lse, lse_layout="th")
        chunk = fb.prefix_chunk_idx
        return self.core.forward_ragged(
            q,
            k,
            v,
            spec,
            cu_seqlens_k=fb.prefix_chunk_cu_seq_lens[chunk],
            max_seqlen_k=int(fb.prefix_chunk_max_seq_lens[chunk]),
            causal=False,
            return_lse=return_lse,
            lse_layout="th",
        )

    forward_decode = forward_extend

    def _layer(self, layer: Any, pool: Any, sinks: Any) -> LayerSpec:
        """A RadixAttention in the core's terms, made once while its facts stay."""
        get = getattr
        window, cap = get(layer, "sliding_window_size", None), get(layer, "logit_cap", 0.0)
        facts = (
            *(layer.scaling, cap, window, layer.is_cross_attention, layer.k_scale, layer.v_scale),
            *(get(layer, "q_scale", None), get(layer, "use_irope", False), sinks, pool),
        )
        cached = self._layers.get(layer.layer_id)
        if cached is not None and all(a is b for a, b in zip(cached[0], facts, strict=True)):
            return cached[1]
        is_local = bool(get(layer, "use_irope", False)) and self.attention_chunk_size is not None
        has_window = window is not None and window > -1 and not layer.is_cross_attention
        spec = LayerSpec(
            layer.layer_id,
            softmax_scale=layer.scaling,
            softcap=cap or 0.0,
            window_size=(int(window or 0), 0) if has_window else (-1, -1),
            attention_chunk=(self.attention_chunk_size or 0) if is_local else 0,
            is_cross_attention=bool(layer.is_cross_attention),
            q_scale=get(layer, "q_scale", None),
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            sinks=None if sinks is None else float32_sinks(sinks),
            uses_swa_pool=self.is_hybrid and _is_in_swa_pool(pool, layer, is_local),
            num_q_heads=int(layer.tp_q_head_num),
            num_kv_heads=int(layer.tp_k_head_num),
            head_dim=int(layer.head_dim),
            v_head_dim=int(get(layer, "v_head_dim", layer.head_dim)),
        )
        # Sinks of 16 bits may be written to later: those are converted at each call.
        if spec.sinks is sinks:
            self._layers[layer.layer_id] = facts, spec
        return spec


def _quantised(q: Any, k_buffer: Any, layer: LayerSpec, dim_v: int) -> tuple[Any, Any]:
    """(queries, output): e4m3 beside such a cache, with an output of the dtype that they had, else
    as they are and None. What lies beyond e4m3's largest becomes that."""
    vq = array.view(q, "q")
    is_e4m3 = array.view(k_buffer, "k_cache").dtype is dtypes.float8_e4m3fn
    if vq.dtype.itemsize != 2 or not is_e4m3 or 0 in vq.shape:
        return q, None
    scale = 1.0 if layer.q_scale is None else layer.q_scale
    out = array.empty((*vq.shape[:-1], dim_v), vq.dtype, vq)
    return quantize_qkv(q, scale_q=scale).q, out


def _is_in_swa_pool(pool: Any, layer: Any, is_local: bool) -> bool:
    """A pool of two parts says which layer is where; else chunked layers are in the second."""
    layers = getattr(pool, "layers_mapping", None)
    if layers is None:
        return is_local
    return bool(layers[layer.layer_id][1])


def config_of(model_runner: Any, num_steps: int, tree_form: str = "mask") -> BackendConfig:
    """What a ModelRunner says, in the core's terms. Heads and head dims come with each layer."""
    model, args = model_runner.model_config, model_runner.server_args
    arch = getattr(model, "attention_arch", None)
    get = getattr
    columns = model_runner.req_to_token_pool.req_to_token.shape[1]
    return BackendConfig(
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=1,
        use_mla=getattr(arch, "name", arch) == "MLA",
        page_size=get(model_runner, "page_size", 1) or 1,
        max_context_len=min(int(model.context_len), columns),
        attention_chunk_size=get(model_runner, "attention_chunk_size", None),
        sliding_window_size=get(model_runner, "sliding_window_size", None),
        topk=get(args, "speculative_eagle_topk", None) or 1,
        num_draft_steps=num_steps or 0,
        num_draft_tokens=get(args, "speculative_num_draft_tokens", None) or 0,
        deterministic=bool(get(args, "enable_deterministic_inference", False)),
        is_hybrid=bool(get(model_runner, "is_hybrid", False)),
        has_encoder=bool(get(model, "is_encoder_decoder", False)),
        tree_form=tree_form,
    )


def _memory_of(model_runner: Any, config: BackendConfig) -> tuple[Any, Any, Any]:
    """The pool, the slots of tokens, and with two pools the slots of the second for those."""
    pool = getattr(model_runner, "token_to_kv_pool", None)
    swa = getattr(pool, "full_to_swa_index_mapping", None) if config.is_hybrid else None
    return pool, model_runner.req_to_token_pool.req_to_token, swa


def mode_of(forward_mode: Any, spec_info: Any) -> ForwardMode:
    """A mode of SGLang's, or of ours, by its name."""
    name = getattr(forward_mode, "name", str(forward_mode))
    mode = _MODES.get(name)
    if mode is None:
        raise UnsupportedError(f"forward_mode: {name} is not supported; one of {', '.join(_MODES)}")
    if mode is ForwardMode.DECODE and spec_info is not None:
        return ForwardMode.DRAFT_DECODE
    return mode


def _first(x: Any, count: int) -> Any:
    """The first entries of an array; a slice costs more than all of a step's checks."""
    return x if x.shape[0] == count else x[:count]


def _host(x: Any) -> np.ndarray:
    """Numbers of the host, in a list or an array of the CPU."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, (list, tuple)):
        return np.asarray(x, np.int64)
    if getattr(x, "is_cuda", None) is False:  # torch's, several times as fast
        return np.asarray(x.numpy())
    v = array.view(x, "a host array")
    if v.device.kind != "cpu":
        raise ArgumentError(
            "seq_lens_cpu, extend_seq_lens_cpu: are on a GPU, and reading them would wait; pass "
            "those of the host"
        )
    return array.as_numpy(v)


class FlashAttentionMultiStepBackend(Observed):
    """The backends of a draft worker's steps over one store: all steps are prepared by one launch.

    topk is that of the server, as in SGLang's.
    """

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        self.model_runner, self.topk = model_runner, topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [
            FlashAttentionBackend(
                model_runner,
                speculative_step_id=step,
                topk=topk,
                speculative_num_steps=speculative_num_steps,
            )
            for step in range(speculative_num_steps)
        ]
        config = self.attn_backends[0].config
        pool, table, swa = _memory_of(model_runner, config)
        self.core = MultiStepDraftBackend(replace(config), pool, table, swa)
        self.core.backends = [backend.core for backend in self.attn_backends]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The metadata of all steps: one launch."""
        self.core.init_forward_metadata(self.attn_backends[0]._batch(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """As of FlashAttentionBackend, for all steps."""
        self.core.init_graph_state(max_bs, max(max_num_tokens, max_bs * max(1, self.topk)))

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: Any) -> None:
        """Give the capture of a graph of all steps its memory."""
        self.core.init_forward_metadata_capture(forward_batch.batch_size)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: Any, bs: int) -> None:
        """Write the first bs requests of a batch into the memory of their graph: one launch."""
        fb = forward_batch
        batch = self.attn_backends[0]._replay_batch(
            bs,
            fb.req_pool_indices,
            fb.seq_lens,
            encoder_lens=getattr(fb, "encoder_lens", None),
            forward_mode=ForwardMode.DRAFT_DECODE,
            spec_info=fb.spec_info,
            seq_lens_cpu=getattr(fb, "seq_lens_cpu", None),
            out_cache_loc=getattr(fb, "out_cache_loc", None),
        )
        self.core.init_forward_metadata_replay(bs, batch)
