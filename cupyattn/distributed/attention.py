"""Attention over keys that are spread over ranks: each attends to its own, and states merge.

A rank gets the queries of all heads, attends to the keys that it holds, and hands the states to
the ranks that own their heads. What it calls for that is an ordinary planned wrapper or an
ordinary call without a plan, told its share of the keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array.match import require_contiguous, require_dtype
from ..core import dtypes, parse
from ..core.key_share import KeyShare
from ..core.observed import Observed
from ..errors import ArgumentError, UnsupportedError
from ..wrappers.mla import BatchMLAPagedAttentionWrapper
from .exchange import StateExchange
from .gather import HeadGather
from .group import Group, checked_group


class _Form(NamedTuple):
    """How a function is told the share of a rank, and gives its states.

    share        names of the options: how many ranks, which, and tokens of a run
    flag         the option that asks for the LSE
    base_on_e    whether LSEs are natural logarithms
    heads_first  whether heads come ahead of the tokens of an LSE's request
    sinks        options that count once, so that rank 0 alone gives them
    always       options of every call with a share
    """

    share: tuple[str, str, str]
    flag: str = "return_lse"
    base_on_e: bool = False
    heads_first: bool = False
    sinks: tuple[str, ...] = ("sinks",)
    always: MappingProxyType[str, Any] = MappingProxyType({})


_CP = "cp_world_size", "cp_rank", "cp_kv_cache_interleave_size"
_WORLD = "cp_world", "cp_rank", "cp_kv_cache_interleave_size"
_FLASH = _Form(
    _CP, "return_softmax_lse", base_on_e=True, heads_first=True, sinks=("sinks", "s_aux")
)
_FORMS = {
    "flash_attn_with_kvcache": _FLASH,
    "flash_attn_varlen_func": _FLASH,
    "trtllm_batch_decode_with_kv_cache": _Form(_WORLD),
    "trtllm_batch_decode_with_kv_cache_mla": _Form(
        _WORLD, always=MappingProxyType({"enable_dcp": True})
    ),
}


class _ContextParallel(Observed):
    """What calls and wrappers share: the queries of all heads, and the exchange."""

    def __init__(
        self,
        group: Group,
        *,
        max_rows: int,
        num_qo_heads: int,
        head_dim: int,
        cp_kv_cache_interleave_size: int,
        q_is_replicated: bool,
        out_dtype: Any,
        lse_base_on_e: bool,
        timeout: float,
        uses_windows: bool | None,
    ) -> None:
        self.group = checked_group(group)
        self.share = KeyShare(group.size, group.rank, cp_kv_cache_interleave_size)
        self.q_is_replicated = parse.flag(q_is_replicated, "q_is_replicated")
        group.handshake(
            {
                "cp_kv_cache_interleave_size": self.share.cp_kv_cache_interleave_size,
                "q_is_replicated": self.q_is_replicated,
            }
        )
        self.exchange = StateExchange(
            group,
            max_rows,
            num_qo_heads,
            head_dim,
            out_dtype=out_dtype,
            lse_base_on_e=lse_base_on_e,
            timeout=timeout,
            uses_windows=uses_windows,
        )
        self.gather = HeadGather(self.exchange)
        gathers = q_is_replicated or self.gather.by_windows or group.can_capture
        self.can_capture = self.exchange.can_capture and gathers

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.exchange.words()}; {self._words()}>"

    def _words(self) -> str:
        """What a rank calls."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the memory back that peers write. All ranks close."""
        self.exchange.close()
        self.gather.close()

    def _share_options(self, form: _Form, given: Mapping[str, Any]) -> dict[str, Any]:
        """What tells a function this rank's share, which a call may not say besides."""
        for name in form.share:
            if name in given:
                raise ArgumentError(
                    f"{name}: got {parse.shown(given[name])}; leave it out, the group says it"
                )
        if self.share.is_whole:
            return {}
        share = self.share
        numbers = share.cp_world_size, share.cp_rank, share.cp_kv_cache_interleave_size
        return {**form.always, **dict(zip(form.share, numbers, strict=True))}

    def _without_sinks(self, options: dict[str, Any], form: _Form) -> dict[str, Any]:
        """The options of this rank: sinks are of all heads, and count once."""
        if self.share.cp_rank == 0:
            return options
        return {name: x for name, x in options.items() if name not in form.sinks}

    def _run(
        self,
        queries: Sequence[Any],
        attend: Callable[..., tuple[Any, Any]],
        heads_first: bool,
        out: Any,
        return_lse: bool,
    ) -> Any:
        """queries: [..., own heads, columns], or of all heads where they are replicated; attend:
        from those of all heads to o [..., heads, head_dim] of float32 and its LSE."""
        self.group.check()
        return_lse = parse.flag(return_lse, "return_lse")
        views = [array.view(x, "q") for x in queries]
        exchange = self.exchange
        heads = exchange.num_heads if self.q_is_replicated else exchange.own_heads
        shape = views[0].shape
        if len(shape) < 2 or shape[-2] != heads:
            whose = "all heads" if self.q_is_replicated else "this rank's heads"
            raise ArgumentError(
                f"q: shape is {list(shape)}; wanted [..., {heads}, columns] of {whose}"
            )
        lead = tuple(shape[:-2])
        rows = int(np.prod(lead, dtype=np.int64))
        own = exchange.own_heads, exchange.head_dim
        self._check_out(out, (*lead, *own))
        if rows:
            exchange.meet(rows, views[0])
        if rows and not self.q_is_replicated and self.group.size > 1:
            queries = self.gather(views)
        if not rows:
            o = array.empty((0, exchange.num_heads, own[1]), dtypes.float32, views[0])
            lse = array.empty((0, exchange.num_heads), dtypes.float32, views[0])
        else:
            o, lse = attend(*queries)
            if o.shape[-1] != own[1]:
                raise ArgumentError(
                    f"head_dim: got {own[1]}, and outputs have {o.shape[-1]} columns; wanted those "
                    "of v"
                )
            o = o.reshape(rows, exchange.num_heads, own[1])
            if heads_first:  # [b, heads, s], or [heads, rows]
                lse = lse.swapaxes(-1, -2)
            lse = lse.reshape(rows, exchange.num_heads)
        flat = None if out is None else out.reshape(rows, *own)
        made, made_lse = exchange.run(o, lse, flat, return_lse=True)
        out = made.reshape(*lead, *own) if out is None else out
        return (out, made_lse.reshape(*lead, own[0])) if return_lse else out

    def _check_out(self, out: Any, shape: tuple[int, ...]) -> None:
        """Before queries are sent: an error of this rank alone leaves no peer waiting for it."""
        if out is None:
            return
        view = array.view(out, "out")
        require_contiguous(view, "out")
        if tuple(view.shape) != shape:
            raise ArgumentError(f"out: shape is {list(view.shape)}; wanted {[*shape]}")
        require_dtype(view, self.exchange.out_dtype, "out")


class ContextParallelCall(_ContextParallel):
    """A call without a plan over keys that ranks share, as one function of the same arguments.

    Parameters
    ----------
    group
        The ranks.
    function
        `flash_attn_with_kvcache`, `flash_attn_varlen_func` (with a table),
        `trtllm_batch_decode_with_kv_cache` or `trtllm_batch_decode_with_kv_cache_mla`, lists of
        keys among them. Lengths, tables and lists that a call gets are this rank's own
        (`cupyattn.shares`); whole lengths, where rows see keys by places, have the function's own
        name: cp_tot_seqused_k, or causal_seqlens_kv_global. Sinks, scales and all else by head are
        of all heads.
    max_rows
        The most query tokens of a call.
    num_qo_heads
        Query heads of all ranks.
    head_dim
        Columns of a row of the output.
    cp_kv_cache_interleave_size
        Tokens of a run, see `cupyattn.shares`.
    q_is_replicated
        Whether a call is given the queries of all heads.
    out_dtype
        The dtype of outputs.
    timeout, uses_windows
        As in StateExchange.

    Notes
    -----
    The ranks of `group` make it together, and call it together, in one order. A call gathers the
    queries of all heads, unless every rank has them (`q_is_replicated`), attends to this rank's
    keys into states of float32, and exchanges them in the order of ranks: the result is the same
    every time. Nothing waits on the host, and where `can_capture` is true a CUDA graph holds it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> from cupyattn.distributed import ContextParallelCall, simulate
    >>> pages = np.ones((4, 16, 2, 64), np.float16)  # of each rank's keys
    >>> table, lengths = np.array([[3, 0]], np.int32), np.array([20], np.int32)  # likewise
    >>> q = np.ones((1, 1, 4, 64), np.float16)  # 4 of 8 heads
    >>> def work(group):
    ...     function = flash_attn.flash_attn_with_kvcache
    ...     call = ContextParallelCall(
    ...         group, function, max_rows=1, num_qo_heads=8, head_dim=64, out_dtype="float16"
    ...     )
    ...     return call(q, pages, pages, cache_seqlens=lengths, page_table=table).shape
    >>> simulate(2, work)
    [(1, 1, 4, 64), (1, 1, 4, 64)]
    """

    def __init__(
        self,
        group: Group,
        function: Callable[..., Any],
        *,
        max_rows: int,
        num_qo_heads: int,
        head_dim: int,
        cp_kv_cache_interleave_size: int = 1,
        q_is_replicated: bool = False,
        out_dtype: Any = "bfloat16",
        timeout: float = 1.0,
        uses_windows: bool | None = None,
    ) -> None:
        name = getattr(function, "__name__", "")
        if name not in _FORMS:
            raise UnsupportedError(
                f"function: got {name or type(function).__name__}; wanted one of "
                f"{', '.join(_FORMS)}"
            )
        self._function, self._form, self._name = function, _FORMS[name], name
        super().__init__(
            group,
            max_rows=max_rows,
            num_qo_heads=num_qo_heads,
            head_dim=head_dim,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            q_is_replicated=q_is_replicated,
            out_dtype=out_dtype,
            lse_base_on_e=self._form.base_on_e,
            timeout=timeout,
            uses_windows=uses_windows,
        )

    def _words(self) -> str:
        return self._name

    def __call__(
        self, q: Any, *args: Any, out: Any = None, return_lse: bool = False, **options: Any
    ) -> Any:
        """The attention of this rank's heads over the keys of all ranks.

        q is [..., own heads, columns] (with `q_is_replicated`: of all heads); other arguments are
        the function's. Returns out [..., own heads, head_dim] of `out_dtype`, written to `out` if
        that is given; with `return_lse` (out, lse [..., own heads]) whose base is the function's.
        """
        form = self._form
        options = {**self._without_sinks(options, form), **self._share_options(form, options)}
        shape = self.exchange.num_heads, self.exchange.head_dim

        def attend(q: Any) -> tuple[Any, Any]:
            v = array.view(q, "q")
            o = array.empty((*v.shape[:-2], *shape), dtypes.float32, v)
            lse = self._function(q, *args, out=o, **{form.flag: True}, **options)[1]
            return o, lse

        return self._run([q], attend, form.heads_first, out, return_lse)


class ContextParallelWrapper(_ContextParallel):
    """A planned wrapper over keys that ranks share.

    Parameters
    ----------
    wrapper
        BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper (drafts that are
        verified, prompts over a cache) or BatchMLAPagedAttentionWrapper, or one that is derived
        from these. `plan` takes its arguments: tables and lengths are this rank's own,
        `cp_tot_seqused_k` whole lengths, heads those of all ranks.
    other arguments
        The rest is as in `ContextParallelCall`.
    lse_base_on_e
        The wrapper's LSEs are natural logarithms; only BatchMLAPagedAttentionWrapper can be
        planned for these (lse_mode="basee").

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> from cupyattn.distributed import ContextParallelWrapper, simulate
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # of each rank's keys
    >>> indptr, indices, last = np.array([0, 2]), np.array([3, 0]), np.array([4])
    >>> def work(group):
    ...     wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    ...     shared = ContextParallelWrapper(
    ...         group, wrapper, max_rows=1, num_qo_heads=8, head_dim=64, out_dtype="float16"
    ...     )
    ...     shared.plan(indptr, indices, last, 8, 2, 64, 16)
    ...     return shared.run(np.ones((1, 4, 64), np.float16), pool).shape
    >>> simulate(2, work)
    [(1, 4, 64), (1, 4, 64)]
    """

    def __init__(
        self,
        group: Group,
        wrapper: Any,
        *,
        max_rows: int,
        num_qo_heads: int,
        head_dim: int,
        cp_kv_cache_interleave_size: int = 1,
        q_is_replicated: bool = False,
        out_dtype: Any = "bfloat16",
        lse_base_on_e: bool = False,
        timeout: float = 1.0,
        uses_windows: bool | None = None,
    ) -> None:
        _require_shares(wrapper)
        self.wrapper = wrapper
        self._is_natural = False  # whether LSEs of the plan are natural logarithms
        self._is_latent = isinstance(wrapper, BatchMLAPagedAttentionWrapper)
        self._form = _Form(_CP)
        super().__init__(
            group,
            max_rows=max_rows,
            num_qo_heads=num_qo_heads,
            head_dim=head_dim,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            q_is_replicated=q_is_replicated,
            out_dtype=out_dtype,
            lse_base_on_e=lse_base_on_e,
            timeout=timeout,
            uses_windows=uses_windows,
        )

    def _words(self) -> str:
        return repr(self.wrapper)

    def plan(self, *args: Any, **options: Any) -> None:
        """wrapper.plan() for this rank's share and outputs of float32."""
        options |= self._share_options(self._form, options)
        options["output_dtype" if self._is_latent else "o_data_type"] = "float32"
        if self.share.is_whole:
            options.pop("cp_tot_seqused_k", None)
        self.wrapper.plan(*args, **options)
        self._is_natural = options.get("lse_mode") == "basee"

    def run(
        self, q: Any, *args: Any, out: Any = None, return_lse: bool = False, **options: Any
    ) -> Any:
        """wrapper.run() of this rank's heads over the keys of all ranks.

        q is [rows, own heads, columns] (with `q_is_replicated`: of all heads), of
        BatchMLAPagedAttentionWrapper two arguments, q_nope and q_pe; other arguments are run()'s.

        Returns
        -------
        result
            As `ContextParallelCall`.
        """
        queries = [q, *args[:1]] if self._is_latent else [q]
        rest = args[len(queries) - 1 :]
        options = self._without_sinks(options, self._form)
        self._check_base(options.get("return_lse_base_on_e", False))

        def attend(*queries: Any) -> tuple[Any, Any]:
            o, lse = self.wrapper.run(*queries, *rest, return_lse=True, **options)
            return o, lse

        return self._run(queries, attend, False, out, return_lse)

    def _check_base(self, return_lse_base_on_e: Any) -> None:
        """States of another base than the exchange's would be merged to wrong numbers."""
        is_natural = self._is_natural or parse.flag(return_lse_base_on_e, "return_lse_base_on_e")
        if is_natural is not self.exchange.lse_base_on_e:
            base = "natural logarithms" if is_natural else "logarithms of base 2"
            raise ArgumentError(
                f"lse_base_on_e: got {self.exchange.lse_base_on_e}, and the wrapper gives {base}; "
                "wanted True with lse_mode='basee' in plan(), or False without it"
            )


def _require_shares(wrapper: Any) -> None:
    """ArgumentError for what is no wrapper, or none of pages that ranks can share."""
    plan, run = (getattr(wrapper, name, None) for name in ("plan", "run"))
    if not callable(plan) or not callable(run):
        raise ArgumentError(
            f"wrapper: got {type(wrapper).__name__}; wanted one that has plan() and run(), "
            "such as BatchDecodeWithPagedKVCacheWrapper"
        )
    parameters = inspect.signature(plan).parameters
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    if _CP[0] not in parameters and not takes_any:
        raise ArgumentError(
            f"wrapper: {type(wrapper).__name__}.plan() takes no {_CP[0]}; wanted one of paged "
            "keys (prompts go to ContextParallelPrefill)"
        )
