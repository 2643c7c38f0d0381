"""A batch of prompts and a batch of decodes in one call, with queries and caches of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..core import parse
from ..engine import geometry
from ..engine.kv_cache import is_pair
from ..engine.mask import NO_MASK, Mask, read_mask
from ..engine.requests import (
    Batch,
    PageNames,
    concatenate,
    join_page_ids,
    read_paged,
    read_rows,
    with_mask,
)
from ..engine.run_batch import make_options, run
from ..engine.wrapper import BatchWrapper, planning
from ..errors import PlanError
from ..typing import Array, Pages, Scale

_PROMPTS = PageNames("kv_indptr_p", "kv_indices_p", "last_page_len_p")
_DECODES = PageNames("kv_indptr_d", "kv_indices_d", "last_page_len_d")
_TOGETHER, _PROMPT, _DECODE = "together", "prompts", "decodes"


class _Form(NamedTuple):
    """How a run serves both: in one launch, in which rows of prompts come first or last, or not."""

    is_together: bool = True
    prompts_first: bool = True
    causal: bool = False


class _Step(NamedTuple):
    """What the last plan() was told."""

    prompts: Batch
    decodes: Batch
    both: Batch
    heads_and_dims: tuple[Any, Any, Any, Any]
    page_size: int
    data_types: tuple[Any, Any]
    plan_options: dict[str, Any]


class BatchPODWithPagedKVCacheWrapper(BatchWrapper):
    """Attention of a batch of prompts and of a batch of decodes, both over pages: plan() once,
    run() for every layer.

    Parameters
    ----------
    float_workspace_buffer, kv_layout
        As in BatchPrefillWithPagedKVCacheWrapper.

    Raises
    ------
    CupyAttnError
        As BatchPrefillWithPagedKVCacheWrapper.

    Notes
    -----
    One launch serves both, as in BatchAttention, where the two caches are the same array and the
    rows of q_p and q_d lie one behind the other in one array, in either order, as slices of a
    step's queries do. Otherwise, and where only prompts have a mask or decodes have scales or
    several rows under causality, it takes a launch for each, one after the other. plan() schedules
    what the last run needed; a run that needs another form schedules it.

    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)
    >>> prompts = np.array([0, 16]), np.array([0, 1]), np.array([1]), np.array([16])
    >>> decodes = np.array([0, 1]), np.array([0, 2]), np.array([3, 0]), np.array([5])
    >>> wrapper = cupyattn.BatchPODWithPagedKVCacheWrapper()
    >>> wrapper.plan(*prompts, *decodes, 8, 2, 64, 16)
    >>> q = np.ones((17, 8, 64), np.float16)
    >>> o_p, o_d = wrapper.run(q[:16], pool, q[16:], pool, causal_p=True)
    >>> o_p.shape, o_d.shape
    ((16, 8, 64), (1, 8, 64))
    """

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout, False, {}, "auto", None)
        apart = {
            name: BatchWrapper(float_workspace_buffer, kv_layout, False, {}, "auto", None)
            for name in (_PROMPT, _DECODE)
        }
        for part in apart.values():
            part._turns = self._turns
        self._apart = apart
        self._step: _Step | None = None
        self._owner: object = None
        self._form = _Form()
        self._ready: dict[str, _Form] = {}

    @planning
    def plan(
        self,
        qo_indptr_p: Array,
        kv_indptr_p: Array,
        kv_indices_p: Array,
        last_page_len_p: Array,
        qo_indptr_d: Array,
        kv_indptr_d: Array,
        kv_indices_d: Array,
        last_page_len_d: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Schedule the batches that the next runs are for.

        Parameters
        ----------
        qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p
            Rows and pages of the prompts, as in BatchPrefillWithPagedKVCacheWrapper.plan; those in
            _d, of the decodes.
        q_data_type, kv_data_type
            Default float16, that of q; data_type is the default of both.
        other arguments
            Other arguments as there, for both batches.

        Raises
        ------
        CupyAttnError
            As that function.
        """
        size = geometry.count(page_size, "page_size")
        is_debugging = self._is_debugging()
        prompts = read_paged(
            read_rows(qo_indptr_p, "qo_indptr_p"),
            kv_indptr_p,
            kv_indices_p,
            last_page_len_p,
            size,
            _PROMPTS,
            is_debugging,
        )
        decodes = read_paged(
            read_rows(qo_indptr_d, "qo_indptr_d"),
            kv_indptr_d,
            kv_indices_d,
            last_page_len_d,
            size,
            _DECODES,
            is_debugging,
        )
        both = concatenate(prompts, decodes)
        join_page_ids(both, prompts, decodes, self._workspace, self._current_stream())
        q_data_type = data_type if q_data_type is None else q_data_type
        step = _Step(
            prompts,
            decodes,
            both,
            (num_qo_heads, num_kv_heads, head_dim, None),
            size,
            (q_data_type, data_type if kv_data_type is None else kv_data_type),
            {
                "pos_encoding_mode": pos_encoding_mode,
                "window_left": window_left,
                "sm_scale": sm_scale,
                "rope_scale": rope_scale,
                "rope_theta": rope_theta,
            },
        )
        if self._is_probe:
            self._measured = self._measure(step)
            return
        self._ready = {}
        form = self._form
        if form.is_together:
            self._install_part(step, _TOGETHER, form, NO_MASK)
        else:
            self._install_part(step, _PROMPT, form, NO_MASK)
            self._install_part(step, _DECODE, form._replace(causal=False), NO_MASK)
        self._step, self._owner = step, self._turns.own

    begin_forward = plan

    def run(
        self,
        q_p: Array,
        paged_kv_cache_p: Pages,
        q_d: Array,
        paged_kv_cache_d: Pages,
        custom_mask_p: Array | None = None,
        packed_custom_mask_p: Array | None = None,
        causal_p: bool = False,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of the planned batches.

        Parameters
        ----------
        q_p, q_d
            [qo_indptr_p[-1], num_qo_heads, head_dim], and of the decodes.
        paged_kv_cache_p, paged_kv_cache_d
            As in BatchPrefillWithPagedKVCacheWrapper.run.
        custom_mask_p, packed_custom_mask_p, causal_p
            Of the prompts, as custom_mask, packed_custom_mask and causal in
            BatchPrefillWithPagedKVCacheWrapper.plan.
        q_scale, k_scale, v_scale
            Of the decodes, as there.
        return_lse
            Return the LSEs too.
        use_fp16_qk_reduction, enable_pdl
            Accepted for compatibility.

        Returns
        -------
        tuple of arrays
            (out_p, out_d), or ((out_p, lse_p), (out_d, lse_d)) if `return_lse`.

        Raises
        ------
        CupyAttnError
            As that function.
        """
        with self._turns.planning:
            step = self._step
            if step is None:
                raise PlanError("run() was called before plan(); call plan() first")
            self._turns.check(self._owner)
            owner = self._owner
            if self._follow(q_p):
                self._owner, step = owner, self._step
                assert step is not None
            causal = parse.flag(causal_p, "causal_p")
            mask = read_mask(custom_mask_p, packed_custom_mask_p)
            has_scales = not (q_scale is k_scale is v_scale is None)
            if mask is NO_MASK and not has_scales and _are_causal(step.decodes, causal):
                if _is_same_cache(paged_kv_cache_p, paged_kv_cache_d):
                    for first, second in ((q_p, q_d), (q_d, q_p)):
                        rows = array.adjoined(first, second, "q_p")
                        if rows is not None:
                            form = _Form(True, first is q_p, causal)
                            return self._run_together(form, rows, paged_kv_cache_p, return_lse)
            form = _Form(False, True, causal)
            of_prompts = make_options(return_lse=return_lse)
            of_decodes = make_options(
                return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
            )
            prompts = self._part(_PROMPT, form, mask)
            out = run(prompts, q=q_p, k=paged_kv_cache_p, options=of_prompts)
            decodes = self._part(_DECODE, form, NO_MASK)
            return out, run(decodes, q=q_d, k=paged_kv_cache_d, options=of_decodes)

    def _run_together(self, form: _Form, q: Any, cache: Any, return_lse: bool) -> Any:
        assert self._step is not None
        part = self._part(_TOGETHER, form, NO_MASK)
        result = run(part, q=q, k=cache, options=make_options(return_lse=return_lse))
        parts = self._step.prompts, self._step.decodes
        at = parts[0 if form.prompts_first else 1].num_rows
        halves = [(x[:at], x[at:]) for x in (result if return_lse else (result,))]
        ordered = [x if form.prompts_first else x[::-1] for x in halves]
        return tuple(zip(*ordered, strict=True)) if return_lse else ordered[0]

    def _part(self, name: str, form: _Form, mask: Mask) -> BatchWrapper:
        """The part planned for a run, now if plan() did not do so."""
        assert self._step is not None
        self._form = form
        if name == _DECODE:
            form = form._replace(causal=False)
        if mask is not NO_MASK or self._ready.get(name) != form:
            # The plan stays that of the thread that brought the tables.
            own = self._turns.own
            self._install_part(self._step, name, form, mask)
            self._turns.own = own
        part = self if name == _TOGETHER else self._apart[name]
        assert part._current is not None
        part._current.owner = self._owner
        return part

    def _install_part(self, step: _Step, name: str, form: _Form, mask: Mask) -> None:
        part = self if name == _TOGETHER else self._apart[name]
        self._ready.pop(name, None)
        batch = {_TOGETHER: step.both, _PROMPT: step.prompts, _DECODE: step.decodes}[name]
        if name == _TOGETHER:
            batch = _with_rows_in_order(step, form.prompts_first)
        elif mask is not NO_MASK:
            batch = with_mask(replace(batch))
        part._require_workspace((self._workspace.owner,))
        options = part._options(
            step.heads_and_dims,
            step.page_size,
            step.data_types,
            mask.form,
            causal=form.causal,
            **step.plan_options,
        )
        part._install(options, batch, mask, (0, True))
        if mask is NO_MASK:
            self._ready[name] = form

    def _parts(self) -> Iterable[BatchWrapper]:
        return self._apart.values()

    def _replace_workspace(self, v: ArrayView, int_workspace_buffer: Any) -> None:
        super()._replace_workspace(v, int_workspace_buffer)
        for part in self._apart.values():
            part._replace_workspace(v, None)

    def _measure(self, step: _Step) -> tuple[int, int]:
        """As workspace_size: the most that any form takes."""
        sizes = []
        for name in (_TOGETHER, _PROMPT, _DECODE):
            probe = copy.copy(self)
            probe._apart = {n: copy.copy(part) for n, part in self._apart.items()}
            part = probe if name == _TOGETHER else probe._apart[name]
            part._is_probe, probe._ready = True, {}
            probe._install_part(step, name, _Form(), NO_MASK)
            sizes.append(part._measured)
        together, *apart = sizes
        return max(x[0] for x in sizes), together[1] + sum(x[1] for x in apart)


def _with_rows_in_order(step: _Step, prompts_first: bool) -> Batch:
    """Both batches, whose page table has the prompts' pages first, and rows in either order."""
    if prompts_first:
        return step.both
    requests = step.both.requests
    count = step.prompts.num_requests
    start = requests.q_start.copy()
    start[:count] += step.decodes.num_rows
    start[count:] -= step.prompts.num_rows
    return replace(step.both, requests=replace(requests, q_start=start))


def _are_causal(decodes: Batch, causal: bool) -> bool:
    """Whether decodes, which see all keys, may be served under the causality of the prompts."""
    return not causal or int(decodes.requests.qo_len.max(initial=0)) <= 1


def _is_same_cache(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if is_pair(a) != is_pair(b) or (is_pair(a) and len(a) != len(b)):
        return False
    pairs = zip(a, b, strict=True) if is_pair(a) else ((a, b),)
    return all(_facts(x, "paged_kv_cache_p") == _facts(y, "paged_kv_cache_d") for x, y in pairs)


def _facts(x: Any, name: str) -> tuple[Any, ...]:
    v: ArrayView = array.view(x, name)
    return v.ptr, tuple(v.shape), tuple(v.strides), v.dtype, v.device, v.framework
