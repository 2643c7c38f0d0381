"""Multi-head latent attention (MLA) of batches over a paged latent cache."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..core import parse
from ..core.parse import require_int
from ..engine import geometry
from ..engine import run_planless as planless
from ..engine.arrays import Arrays, RunArrays
from ..engine.check_planless import Options
from ..engine.key_share import read_share, with_whole_lengths
from ..engine.latent_rows import Dims
from ..engine.mask import NO_MASK
from ..engine.plan_again import repeated
from ..engine.requests import PageNames, host_integers, on_host, read_paged, read_rows
from ..engine.run_batch import run
from ..engine.run_latent import LatentOptions, make_latent_options
from ..engine.views import LATENT_NAMES
from ..engine.wrapper import BatchWrapper, planning
from ..errors import ArgumentError, UnsupportedError
from ..typing import Array

_NAMES = PageNames("kv_indptr", "kv_indices", "kv_len_arr")
# What run() calls the two parts of its arrays.
_SPLIT_Q, _SPLIT_K = "q_nope/q_pe", "ckv_cache/kpe_cache"
_SPLIT_NAMES = f"{_SPLIT_Q}/{_SPLIT_K}"
_SPLIT = LatentOptions(_SPLIT_NAMES)
_WITHOUT_PLAN = LATENT_NAMES.but(
    q="q", q_rope="q[1]", block_tables="page_table", sm_scale="sm_scale"
)
_LSE_MODES = "none", "base2", "basee"
_SCALE_MODES = "default", "kv-per-tensor", "bmm-scalar"


class MLAPlanMetadata(NamedTuple):
    """The lengths of a batch, as plan(metadata=...) takes them.

    Made by `csr`, of a page table of CSR form, or `dense`, of a rectangular one.
    """

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    kv_len_arr: Any
    block_tables: Any = None

    @classmethod
    def csr(
        cls, qo_indptr: Array, kv_indptr: Array, kv_indices: Array, kv_len_arr: Array
    ) -> MLAPlanMetadata:
        """Arrays as in BatchMLAPagedAttentionWrapper.plan."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: Array | None,
        block_tables: Array,
        seq_lens: Array | None,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """cum_seq_lens_q [B + 1]; block_tables int32 [B, max_pages]; seq_lens [B], keys of each
        request. max_q_len is accepted for compatibility."""
        return cls(cum_seq_lens_q, None, None, seq_lens, block_tables)


class BatchMLAPagedAttentionWrapper(BatchWrapper):
    """Latent attention of a batch, in its absorbed form, planned once and run in every layer.

    Queries have 512 latent and 64 rope columns for each head, the cache has one such row for each
    token; logits are the products of both parts, and a value is the latent part of its key. So a
    model multiplies its queries by W_UK before, and the output by W_UV behind.

    Parameters
    ----------
    float_workspace_buffer
        Bytes on a 16-byte boundary, for partial states; or None, for memory of the wrapper's own,
        which grows as plans need it.
    use_cuda_graph
        Captured runs follow later plans, for batches of as many requests.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr
        Needed then: int32 [B + 1], [B + 1], [most pages of a batch] and [B] on the device, which
        plan() fills.
    backend
        Accepted for compatibility; all names serve.
    kv_layout
        Accepted for compatibility: a latent cache has one head.

    Raises
    ------
    CupyAttnError
        As BatchDecodeWithPagedKVCacheWrapper.

    Notes
    -----
    Semantics: FlashInfer's class of the same name. On Hopper and older GPUs this one also takes any
    number of heads, sinks and head_dim_ckv 256.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> cache = np.ones((4, 64, 576), np.float16)  # pages of 512 latent and 64 rope columns
    >>> wrapper = cupyattn.BatchMLAPagedAttentionWrapper(None)
    >>> wrapper.plan(
    ...     np.array([0, 1, 2]), np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([100, 20]),
    ...     16, 512, 64, 64, True, 192**-0.5, "float16", "float16",
    ... )
    >>> q = np.ones((2, 16, 576), np.float16)  # absorbed queries
    >>> wrapper.run(query=q, kv_cache=cache).shape
    (2, 16, 512)
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: bool = False,
        qo_indptr: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        kv_len_arr: Array | None = None,
        backend: str = "auto",
        *,
        kv_layout: str = "NHD",
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, backend, None)
        self._lse_mode = "base2"

    @planning
    @repeated("qo_indptr", *_NAMES, state=("_lse_mode",))
    def plan(
        self,
        qo_indptr: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        kv_len_arr: Array | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Array | None = None,
        block_tables: Array | None = None,
        seq_lens: Array | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_kv_cache_interleave_size: int = 1,
        cp_tot_seqused_k: Array | None = None,
        window_left: int = -1,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        qo_indptr
            int32 or int64 [B + 1] from 0 on: rows of q of each request, its last tokens.
        kv_indptr, kv_indices
            [B + 1] or longer, in pages, and [>= kv_indptr[B]], the pages of all requests.
        kv_len_arr
            [B]: keys of each request, at most page_size for each of its pages; 0: its rows give 0
            and -inf. Offsets and lengths are needed on the host; kv_indices may stay on the GPU.
        metadata
            MLAPlanMetadata, in place of these four.
        cum_seq_lens_q, block_tables, seq_lens
            Those of MLAPlanMetadata.dense, likewise.
        num_heads
            Query heads, any number.
        head_dim_ckv
            512 or 256.
        head_dim_kpe
            64 or 0.
        page_size
            Tokens of a page.
        causal
            Row i of a request sees keys up to i + kv_len - qo_len; default False.
        window_left
            Row i sees no more than so many keys before its own, key i + kv_len - qo_len; -1: all.
            Older ones are not read.
        sm_scale
            The scale of the logits, required: 1 / sqrt(128 + 64), the head dim before absorption,
            in DeepSeek's models.
        q_data_type, kv_data_type
            "float16" or "bfloat16" (default), kv_data_type also "float8_e4m3fn".
        output_dtype
            Of run()'s outputs, default q_data_type; an `out` of fp8 is planned by it.
        fixed_split_size, disable_split_kv
            As in BatchDecodeWithPagedKVCacheWrapper.plan.
        cp_world_size, cp_rank, cp_kv_cache_interleave_size, cp_tot_seqused_k
            As there: this rank's share of the keys; causality and a window need the last of them.
        lse_mode
            "basee": run() gives natural logarithms, else base 2.
        query_layout, kv_cache_layout
            "packed" or "split"; accepted for compatibility: run() sees what it is given.
        scale_mode, use_sinks, enable_pdl, skip_softmax, max_q_len
            Accepted for compatibility.
        output_scale
            Must be "none".
        use_profiler
            Must be False.

        Raises
        ------
        CupyAttnError
            ArgumentError, UnsupportedError or WorkspaceError; the last plan then stays in force.
        """
        if parse.flag(use_profiler, "use_profiler"):
            raise UnsupportedError("use_profiler: kernels are not instrumented; pass False")
        parse.choice(output_scale, ("none",), "output_scale")
        parse.choice(scale_mode, _SCALE_MODES, "scale_mode")
        parse.choice(lse_mode, _LSE_MODES, "lse_mode")
        for name, layout in (("query_layout", query_layout), ("kv_cache_layout", kv_cache_layout)):
            if layout is not None:
                parse.choice(layout, ("packed", "split"), name)
        if sm_scale is None:
            raise ArgumentError(
                "sm_scale: got None; wanted the scale of the model, 1 / sqrt(128 + 64) in "
                "DeepSeek's: absorbed heads do not tell it"
            )
        heads = geometry.count(num_heads, "num_heads")
        ckv = geometry.count(head_dim_ckv, "head_dim_ckv")
        kpe = require_int(head_dim_kpe, "head_dim_kpe", 0)
        page_size = geometry.count(page_size, "page_size")
        if metadata is None and block_tables is not None:
            metadata = MLAPlanMetadata.dense(cum_seq_lens_q, block_tables, seq_lens)
        if metadata is None:
            metadata = MLAPlanMetadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        elif not isinstance(metadata, MLAPlanMetadata):
            raise ArgumentError(
                f"metadata: got {parse.shown(metadata)}; wanted MLAPlanMetadata.csr(...) or "
                "MLAPlanMetadata.dense(...)"
            )
        table = _csr_of(metadata, page_size)
        split = geometry.split_size(fixed_split_size, disable_split_kv, page_size)
        qo_indptr, kv_indptr, kv_len_arr = on_host(
            table.qo_indptr, table.kv_indptr, table.kv_len_arr
        )
        rows = read_rows(qo_indptr)
        batch = read_paged(
            rows,
            _first(kv_indptr, len(rows.lengths) + 1),
            table.kv_indices,
            kv_len_arr,
            page_size,
            _NAMES,
            self._is_debugging(),
            has_lengths=True,
        )
        share = read_share(cp_world_size, cp_rank, cp_kv_cache_interleave_size)
        q_data_type = "bfloat16" if q_data_type is None else q_data_type
        options = self._options(
            (heads, 1, ckv + kpe, ckv),
            page_size,
            (q_data_type, q_data_type if kv_data_type is None else kv_data_type),
            causal=False if causal is None else causal,
            window_left=window_left,
            sm_scale=sm_scale,
            o_dtype=output_dtype,
            latent=True,
            key_share=share,
        )
        batch = with_whole_lengths(batch, share, cp_tot_seqused_k)
        self._install(options, batch, NO_MASK, split)
        if not self._is_probe:
            self._lse_mode = lse_mode

    begin_forward = plan

    def run(
        self,
        q_nope: Array | None = None,
        q_pe: Array | None = None,
        ckv_cache: Array | None = None,
        kpe_cache: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: bool = False,
        o_scale: Any = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Array | None = None,
        kpe_scale: float | None = None,
        sinks: Array | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> Any:
        """Latent attention of the planned batch.

        Parameters
        ----------
        q_nope, q_pe
            [rows, num_heads, head_dim_ckv], multiplied by W_UK, and [rows, num_heads,
            head_dim_kpe].
        query
            Instead, one array with both, latent columns first, or a pair.
        ckv_cache, kpe_cache
            [num_pages, page_size, head_dim_ckv] and [num_pages, page_size, head_dim_kpe]. An axis
            of one head before or behind page_size is allowed, and none of page_size for pages of
            one token. Strides are any.
        kv_cache
            Instead, one array with both, or a pair.
        out, lse
            Arrays to write instead of new ones; lse float32 [rows, num_heads].
        return_lse
            Return the LSE too.
        return_lse_base_on_e
            Natural logarithms, not base 2.
        ckv_scale, kpe_scale
            Of a cache of fp8: each part times its scale.
        ckv_scale_arr
            float32 [num_pages, page_size], scales the latent part of each token; of GPUs on sm_90
            only.
        sinks
            float32 [num_heads]: extra natural-log logits in the denominator.
        bmm1_scale, bmm2_scale
            Numbers: the whole scale of the logits in place of the plan's, and of the output.
        o_scale
            What an `out` of fp8 is to be multiplied by to be the output, a positive number.
        kv_len, page_table
            int32 [B] and [B, max_pages] of one token of each request, whose lengths then stay on
            the device: a call without a plan, with the scale 1 / sqrt(128 + 64). It takes no scales
            of caches, and its LSE is in base 2.
        profiler_buffer
            Must be None.
        skip_softmax_threshold_scale_factor
            Accepted for compatibility.

        Returns
        -------
        out
            [rows, num_heads, head_dim_ckv] in q's framework and device, or (out, lse) if
            `return_lse`. It never waits for the device.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays that do not fit the plan, PlanError without one, before
            anything is written.
        """
        if profiler_buffer is not None:
            geometry.refuse("not supported", profiler_buffer=profiler_buffer)
        if o_scale is not None:
            bmm2_scale = _scale_of_output(o_scale, out, bmm2_scale)
        q, q_rope, k, k_rope, names = q_nope, q_pe, ckv_cache, kpe_cache, _SPLIT_NAMES
        if not (query is kv_cache is None) or q is None or k is None:
            (q, q_rope), of_q = _parts(query, (q, q_rope), "query", _SPLIT_Q)
            (k, k_rope), of_k = _parts(kv_cache, (k, k_rope), "kv_cache", _SPLIT_K)
            names = f"{of_q}/{of_k}"
        if not (kv_len is page_table is None):
            scales = {
                "ckv_scale": ckv_scale,
                "ckv_scale_arr": ckv_scale_arr,
                "kpe_scale": kpe_scale,
            }
            geometry.refuse("is not supported with page_table", **scales)
            return self._run_without_plan(
                RunArrays(q=q, k=k, out=out, lse=lse, sinks=sinks, q_rope=q_rope, k_rope=k_rope),
                page_table=page_table,
                kv_lens=kv_len,
                sm_scale=bmm1_scale,
                output_scale=bmm2_scale,
                return_lse=return_lse,
            )
        natural_lse = self._lse_mode == "basee"
        if return_lse_base_on_e is not False:
            natural_lse |= parse.flag(return_lse_base_on_e, "return_lse_base_on_e")
        options = _SPLIT
        if (
            natural_lse
            or return_lse is not False
            or not (ckv_scale is ckv_scale_arr is kpe_scale is bmm1_scale is bmm2_scale is None)
            or names is not _SPLIT_NAMES
        ):
            options = make_latent_options(
                names=names,
                return_lse=return_lse,
                natural_lse=natural_lse,
                ckv_scale=ckv_scale,
                ckv_scale_arr=ckv_scale_arr,
                kpe_scale=kpe_scale,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
            )
        return run(
            self,
            q=q,
            k=k,
            out=out,
            lse=lse,
            sinks=sinks,
            q_rope=q_rope,
            k_rope=k_rope,
            options=options,
        )

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """run(return_lse=True)."""
        kwargs["return_lse"] = True
        return self.run(*args, **kwargs)

    def forward(
        self,
        q: Array,
        kv_cache: Any,
        page_table: Array | None = None,
        seq_lens: Array | None = None,
        *,
        sm_scale: float | None = None,
        out: Array | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Latent attention without a plan: one call for the last token of each request.

        Parameters
        ----------
        q
            [B, num_heads, 576] or a pair (q_nope, q_pe).
        kv_cache
            As in run(), packed or a pair.
        page_table, seq_lens
            int32 [B, max_pages] and [B]. They stay on the device.
        sm_scale
            Default 1 / sqrt(128 + 64), that of DeepSeek's models.
        out
            The array to write instead of a new one.
        return_lse
            Return the LSE too.

        Notes
        -----
        Without page_table and seq_lens it is run(query=q, kv_cache=kv_cache).
        """
        if page_table is None and seq_lens is None:
            return self.run(query=q, kv_cache=kv_cache, out=out, return_lse=return_lse)
        (q, q_rope), _ = _parts(q, (None, None), "q", _SPLIT_Q)
        (k, k_rope), _ = _parts(kv_cache, (None, None), "kv_cache", _SPLIT_K)
        return self._run_without_plan(
            RunArrays(q=q, k=k, out=out, q_rope=q_rope, k_rope=k_rope),
            page_table=page_table,
            kv_lens=seq_lens,
            sm_scale=sm_scale,
            output_scale=None,
            return_lse=return_lse,
            lengths_name="seq_lens",
        )

    def _run_without_plan(
        self,
        arrays: RunArrays,
        *,
        page_table: Any,
        kv_lens: Any,
        sm_scale: Any,
        output_scale: Any,
        return_lse: bool,
        lengths_name: str = "kv_len",
    ) -> Any:
        """One token of each request."""
        if page_table is None or kv_lens is None:
            raise ArgumentError(
                f"page_table, {lengths_name}: got one of them; wanted both, or none"
            )
        call = Arrays(
            q=arrays.q,
            k=arrays.k,
            workspace=self._workspace.owner if self._has_workspace else None,
            block_tables=page_table,
            kv_lens=kv_lens,
            out=arrays.out,
            lse=arrays.lse,
            sinks=arrays.sinks,
            q_rope=arrays.q_rope,
            k_rope=arrays.k_rope,
        )
        options = Options(
            _WITHOUT_PLAN,
            dims=Dims(512, 64),
            sm_scale=parse.finite(sm_scale, "sm_scale", 1.0 / math.sqrt(192.0)),
            output_scale=parse.finite(output_scale, "bmm2_scale", 1.0),
            causal=False,
            return_lse=parse.flag(return_lse, "return_lse"),
        )
        return planless.run(call, options)


def _scale_of_output(o_scale: Any, out: Any, bmm2_scale: Any) -> float:
    """What the output is multiplied by, so that `out` times o_scale is it."""
    is_number = isinstance(o_scale, numbers.Real) and not isinstance(o_scale, bool)
    if not is_number or not 0.0 < o_scale < math.inf:
        raise ArgumentError(
            f"o_scale: got {parse.shown(o_scale)}; o_scale must be a finite positive value"
        )
    if out is None:
        raise ArgumentError("out: got None; an out tensor must be provided with o_scale")
    dtype = array.view(out, "out").dtype
    if not dtype.is_fp8:
        raise ArgumentError(f"out: dtype is {dtype}; out must be an FP8 tensor with o_scale")
    return parse.finite(bmm2_scale, "bmm2_scale", 1.0) / float(o_scale)


def _parts(
    both: Any, apart: tuple[Any, Any], name: str, split_names: str
) -> tuple[tuple[Any, Any], str]:
    """The two parts of an argument that is given as one array, as a pair, or as two arguments, and
    what they are called."""
    first, second = split_names.split("/")
    if both is None:
        if apart[0] is None:
            raise ArgumentError(f"{first}: got None; wanted {first} and {second}, or {name}")
        return apart, split_names
    if not (apart[0] is apart[1] is None):
        raise ArgumentError(f"{name}: given beside {first}; wanted one form")
    if isinstance(both, (tuple, list)):
        if len(both) != 2:
            raise ArgumentError(f"{name}: got {len(both)} arrays; wanted one, or a pair")
        return (both[0], both[1]), f"{name}[0]/{name}[1]"
    return (both, None), f"{name}/{name}[1]"


def _first(kv_indptr: Any, count: int) -> Any:
    """The first of offsets that may be those of more requests."""
    offsets = host_integers(kv_indptr, "kv_indptr")
    return kv_indptr if offsets.size <= count else offsets[:count]


def _csr_of(metadata: MLAPlanMetadata, page_size: int) -> MLAPlanMetadata:
    """The page table in CSR form; a rectangular one is read on the host."""
    if metadata.block_tables is None:
        for name, x in zip(metadata._fields, metadata[:4], strict=False):
            if x is None:
                raise ArgumentError(f"{name}: got None; wanted the lengths of the batch")
        return metadata
    for name, x in (("cum_seq_lens_q", metadata.qo_indptr), ("seq_lens", metadata.kv_len_arr)):
        if x is None:
            raise ArgumentError(f"{name}: got None; wanted it beside block_tables")
    arrays = metadata.qo_indptr, metadata.block_tables, metadata.kv_len_arr
    qo_indptr, block_tables, kv_lens = on_host(*arrays)
    table = array.to_host(array.view(block_tables, "block_tables"))
    lengths = host_integers(kv_lens, "seq_lens")
    if table.ndim != 2 or len(table) != len(lengths):
        raise ArgumentError(
            f"block_tables: shape is {list(table.shape)}; wanted [{len(lengths)}, max_pages], a "
            "row for each of seq_lens"
        )
    if (lengths < 0).any() or (-(-lengths // page_size) > table.shape[1]).any():
        raise ArgumentError(
            f"seq_lens: {lengths.tolist()[:8]} do not fit the {table.shape[1]} pages of "
            f"{page_size} in each row of block_tables"
        )
    pages = -(-lengths // page_size)
    indptr = np.concatenate([[0], np.cumsum(pages)])
    used = np.arange(table.shape[1]) < pages[:, None]
    return MLAPlanMetadata(qo_indptr, indptr, table[used], lengths)
