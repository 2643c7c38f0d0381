"""Prefill of prompts whose tokens are spread over the ranks of a group."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_array, match_output, require_contiguous_last
from ..cascade import merge_states
from ..core import dtypes, overloads, parse
from ..core.tracing import Untraced
from ..errors import ArgumentError, CupyAttnError, DistributedError, PlanError, UnsupportedError
from ..slots import reshape_and_cache
from ..typing import Array
from .exchanged_rows import ExchangedRows
from .group import Group, checked_group
from .heads import head_range
from .peer_memory import PeerMemory
from .pieces import ZigZag
from .prefill_cost import Choice, Prompt, Rates, choose
from .prefill_plan import Chunk, PrefillPlan, make_plan
from .prefill_stage import PrefillOptions, StageWrapper, read_options
from .side_stream import SideStream
from .ulysses import Ulysses

_METHODS = "gather", "overlap", "ulysses"
_MAX_LENGTHS = 16  # that ranks compare one by one, and messages show


class ContextParallelPrefill(Untraced):
    """Attention of prompts over the GPUs of a group: plan() on all ranks, run() for every layer.

    Every rank has a part of each request's tokens, cut zig-zag (`ZigZag`), of q, k and v, and gets
    the answers of these tokens. Three ways lead there, and plan() takes the one that a model of
    cost says is the soonest:

    gather
        keys of all ranks are gathered, and each rank's rows attend to them in one launch; or in
        two, the first of which runs while the second half of the keys is on its way
    overlap
        A rank's tokens attend to each other while the keys of the other ranks come in chunks, to
        which they attend as they come; the states are merged in a fixed order
    ulysses
        an all-to-all gives each rank all tokens of a part of the heads, and another one brings the
        answers back. It needs heads that the ranks divide (`head_range`)

    Collectives of keys run on a stream of their own; nothing waits on the host. Answers are the
    same bits at every call, and within rounding those of one GPU.

    Parameters
    ----------
    group
        The group of all ranks that call; their arrays are on its GPUs (CuPy's or torch's), or on
        the CPU.
    method
        "auto", or one of the three.
    rates
        What the model of cost takes for granted (`Rates`), for other GPUs and networks; the same on
        all ranks.

    Notes
    -----
    On each of two ranks::

        >>> import numpy as np
        >>> from cupyattn.distributed import ContextParallelPrefill, ZigZag, simulate
        >>> qo_indptr = np.array([0, 100, 164])  # of whole requests
        >>> q = np.ones((164, 8, 64), np.float16)
        >>> k = v = np.ones((164, 2, 64), np.float16)
        >>> def work(group):
        ...     share = ZigZag(qo_indptr, group.size)
        ...     own = [share.cut(x, group.rank) for x in (q, k, v)]
        ...     prefill = ContextParallelPrefill(group)
        ...     prefill.plan(qo_indptr, 8, 2, 64)
        ...     return prefill.run(*own)
        >>> [out.shape for out in simulate(2, work)]
        [(82, 8, 64), (82, 8, 64)]
    """

    def __init__(self, group: Group, *, method: str = "auto", rates: Rates | None = None) -> None:
        if rates is not None and not isinstance(rates, Rates):
            raise ArgumentError(
                f"rates: got {type(rates).__name__}; wanted cupyattn.distributed.Rates, or None"
            )
        self.group = checked_group(group)
        self._method = parse.choice(method, ("auto", *_METHODS), "method")
        self._rates = Rates() if rates is None else rates
        self._options: PrefillOptions | None = None
        self._share: ZigZag | None = None
        self._choice: Choice | None = None
        self._way: _Gathered | Ulysses | None = None
        self._peers = PeerMemory(group)

    def plan(
        self,
        qo_indptr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = True,
        q_data_type: Any = "float16",
        o_data_type: Any = None,
        num_chunks: int | None = None,
        **options: Any,
    ) -> None:
        """Schedule the batch that the next runs are for. All ranks call it, with equal arguments.

        Parameters
        ----------
        qo_indptr
            int32 or int64 [B + 1] from 0 on: the rows of each whole request, all ranks' tokens
            together; needed on the host.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo
            Of the whole model, as in BatchPrefillWithRaggedKVCacheWrapper.plan.
        causal
            True by default, as prompts are. Windows without it need "ulysses".
        q_data_type
            float16 or bfloat16, of k and v too; float32 on the CPU.
        o_data_type
            Of the answer: that of q by default, or float32.
        num_chunks
            Of keys that come one after another: 1 or 2 for "gather", 1 or an even number for
            "overlap", if the method is named; None: by the model of cost.
        options
            sm_scale, logits_soft_cap, windows, pos_encoding_mode and what belongs to it, as in
            BatchPrefillWithRaggedKVCacheWrapper.plan; positions are those in the whole request.
            "overlap" has no windows and no pos_encoding_mode, "ulysses" no ALiBi.

        Raises
        ------
        CupyAttnError
            ArgumentError and UnsupportedError as plan() of one GPU does, and for heads that
            "ulysses" does not divide, before anything is launched.

        Notes
        -----
        Ranks compare their arguments first: DistributedError says which rank differs, and in what.
        """
        problem: CupyAttnError | None = None
        facts: dict[str, Any] = {}
        try:
            share = ZigZag(qo_indptr, self.group.size)
            checked = read_options(
                (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
                q_data_type,
                self.group.on_gpu,
                {"causal": causal, "o_dtype": o_data_type, **options},
            )
            methods = self._methods(checked, num_chunks)
            facts = {**checked.facts(), **_lengths(share)}
            facts |= {"method": self._method, "num_chunks": num_chunks, "rates": self._rates}
        except CupyAttnError as error:
            problem, facts = error, {"error in plan()": str(error)}
        try:
            self.group.handshake(facts)
        except DistributedError:
            if problem is None:
                raise
        if problem is not None:
            raise problem
        has_peers = methods != ("ulysses",) and self._peers.reserve(_gathered_bytes(share, checked))
        choice = self._choose(share, checked, methods, has_peers, num_chunks)
        self._way = None  # before another takes its memory
        if choice.method == "ulysses":
            self._way = Ulysses(self.group, share, checked)
        else:
            peers = self._peers if has_peers else None
            self._way = _Gathered(self.group, share, checked, choice, peers)
        self._share, self._options, self._choice = share, checked, choice

    @overloads.parallel_prefill_run
    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of this rank's tokens. All ranks call it.

        Parameters
        ----------
        q
            [n, num_qo_heads, head_dim_qk]: this rank's rows, `ZigZag.rows(rank)` of the batch.
        k, v
            [n, num_kv_heads, head_dim]: those of the same tokens.
        out, lse
            Arrays to write instead of new ones: [n, num_qo_heads, head_dim_vo] of o_data_type,
            float32 [n, num_qo_heads].
        return_lse
            Return the LSE too.

        Returns
        -------
        result
            out, or (out, lse) if `return_lse`; LSE have base 2. The first run of a plan makes
            memory for what ranks exchange; a CUDA graph may capture later ones where the group can
            be captured.

        Raises
        ------
        CupyAttnError
            PlanError without a plan, ArgumentError for arrays that do not fit it, before anything
            is sent; DeviceError if another rank has ended.

        Notes
        -----
        Arrays have any strides but for a contiguous last dimension.
        """
        way = self._way
        if way is None:
            raise PlanError("run() was called before plan(); call plan() first")
        return_lse = parse.flag(return_lse, "return_lse")  # type: ignore[assignment]
        vq, vk, vv = self._view_inputs(q, k, v)
        vout, vlse = self._view_outputs(out, lse, vq, vk, vv)
        assert self._options is not None
        shape = vq.shape[0], self._options.heads_and_dims[0], self._options.heads_and_dims[3]
        self.group.check()
        if vout is None:
            out = array.empty(shape, self._options.spec.dtype_o, vq)
            vout = array.view(out, "out")
        if vlse is None and return_lse:
            lse = array.empty(shape[:2], dtypes.float32, vq)
            vlse = array.view(lse, "lse")
        way.run(vq, vk, vv, vout, vlse)
        return (out, lse) if return_lse else out

    def __repr__(self) -> str:
        planned = "nothing is planned" if self._choice is None else self._choice.name
        return f"<ContextParallelPrefill: {self.group.describe()}; {planned}>"

    def close(self) -> None:
        """Give back what runs exchange, which peers write; all ranks call it. (A group that is
        closed gives back what is left.) A graph of a run may not be replayed any more."""
        self._way = self._choice = None
        self._peers.close()

    def describe(self) -> str:
        """What plan() chose, in a sentence with the estimates of the other ways."""
        if self._choice is None:
            raise PlanError("describe() was called before plan(); call plan() first")
        return self._choice.describe()

    def _methods(self, options: PrefillOptions, num_chunks: Any) -> tuple[str, ...]:
        """The methods that serve; UnsupportedError where none does."""
        refusals = {
            method: refusal
            for method in _METHODS
            if (refusal := _refusal(method, options, self.group.size)) is not None
        }
        wanted = _METHODS if self._method == "auto" else (self._method,)
        methods = tuple(method for method in wanted if method not in refusals)
        if not methods:
            raise UnsupportedError("; ".join(refusals[method] for method in wanted))
        if num_chunks is not None:
            self._check_chunks(parse.require_int(num_chunks, "num_chunks"))
        return methods

    def _check_chunks(self, count: int) -> None:
        if self._method not in ("gather", "overlap"):
            raise ArgumentError(
                f"num_chunks: got {count} with method={self._method!r}; wanted None, or the method "
                "'gather' or 'overlap'"
            )
        is_fit = count in (1, 2) if self._method == "gather" else count == 1 or count % 2 == 0
        if not is_fit:
            wanted = "1 or 2" if self._method == "gather" else "1 or an even number"
            raise ArgumentError(f"num_chunks: got {count} for {self._method!r}; wanted {wanted}")

    def _choose(
        self,
        share: ZigZag,
        options: PrefillOptions,
        methods: tuple[str, ...],
        has_peers: bool,
        num_chunks: int | None,
    ) -> Choice:
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo = options.heads_and_dims
        prompt = Prompt(
            share.lengths,
            self.group.size,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            itemsize=options.dtype.itemsize,
            causal=options.spec.causal,
            window_left=options.spec.window_left,
        )
        chosen = choose(prompt, self._rates, methods, has_peers)
        if num_chunks is None:
            return chosen
        known = (x for x in (chosen, *chosen.others) if x.num_chunks == num_chunks)
        seconds = next((x.seconds for x in known), chosen.seconds)
        return Choice(self._method, num_chunks, seconds, chosen.attention)

    def _view_inputs(self, q: Any, k: Any, v: Any) -> tuple[ArrayView, ArrayView, ArrayView]:
        assert self._options is not None and self._share is not None
        views = vq, vk, vv = array.view(q, "q"), array.view(k, "k"), array.view(v, "v")
        num_rows = int(self._share.counts(self.group.rank).sum())
        names = "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"
        dims = dict(zip(names, self._options.heads_and_dims, strict=True))
        shapes = (
            "_ num_qo_heads head_dim_qk",
            "_ num_kv_heads head_dim_qk",
            "_ num_kv_heads head_dim_vo",
        )
        for x, shape, name in zip(views, shapes, "qkv", strict=True):
            match_array(x, shape, self._options.dtype, name, dims)
            if x.shape[0] != num_rows:
                raise ArgumentError(
                    f"{name}: holds {x.shape[0]} rows; wanted {num_rows}, the tokens of rank "
                    f"{self.group.rank} of {self.group.size} (ZigZag(qo_indptr, size).rows(rank))"
                )
            if x.framework not in ("torch", "cupy", "numpy") or x.framework != vq.framework:
                raise ArgumentError(
                    f"{name}: is an array of {x.framework}; wanted all of CuPy, all of torch, or "
                    "all of NumPy (JAX arrays go to cupyattn.integrations.jax)"
                )
        device = array.same_device(q=vq, k=vk, v=vv)
        if (device.kind == "cuda") is not self.group.on_gpu:
            kind = "a GPU" if self.group.on_gpu else "the CPU"
            raise ArgumentError(f"q: is on {device}, and the group's arrays are on {kind}")
        return vq, vk, vv

    def _view_outputs(
        self, out: Any, lse: Any, vq: ArrayView, vk: ArrayView, vv: ArrayView
    ) -> tuple[ArrayView | None, ArrayView | None]:
        assert self._options is not None
        heads, dim = self._options.heads_and_dims[0], self._options.heads_and_dims[3]
        vout = None if out is None else array.view(out, "out")
        vlse = None if lse is None else array.view(lse, "lse")
        inputs: dict[str, ArrayView | None] = {"q": vq, "k": vk, "v": vv}
        shape = vq.shape[0], heads, dim
        remedy = "pass such an array, or plan with o_data_type"
        match_output(vout, shape, self._options.spec.dtype_o, "out", remedy, **inputs)
        match_output(vlse, shape[:2], dtypes.float32, "lse", **inputs, out=vout)
        for x, name in ((vout, "out"), (vlse, "lse")):
            if x is not None:
                require_contiguous_last(x, name)
        array.same_device(q=vq, out=vout, lse=vlse)
        return vout, vlse


def _lengths(share: ZigZag) -> dict[str, Any]:
    """What ranks compare of the lengths of requests."""
    facts: dict[str, Any] = {"requests": share.num_requests, "tokens": share.num_tokens}
    if share.num_requests <= _MAX_LENGTHS:
        facts["lengths"] = share.lengths.tolist()
    else:
        facts["lengths of digest"] = hashlib.sha256(share.lengths.tobytes()).hexdigest()[:16]
    return facts


def _key_bytes(options: PrefillOptions) -> int:
    """The bytes of a token's keys and values."""
    _, num_kv_heads, dim_qk, dim_vo = options.heads_and_dims
    return num_kv_heads * (dim_qk + dim_vo) * options.dtype.itemsize


def _gathered_bytes(share: ZigZag, options: PrefillOptions) -> int:
    """What all ranks give where no window spares them any."""
    rows = max(int(share.counts(rank).sum()) for rank in range(share.size))
    return max(1, share.size * rows * _key_bytes(options))


def _refusal(method: str, options: PrefillOptions, size: int) -> str | None:
    """Why a method does not serve, in a sentence."""
    spec = options.spec
    if size == 1:
        return None
    has_windows = max(spec.window_left, spec.right_limit) >= 0
    if method == "ulysses":
        try:
            head_range(spec.num_qo_heads, spec.num_kv_heads, size, 0)
        except ArgumentError as error:
            return f"method 'ulysses': {error}"
        if spec.pos_encoding == "ALIBI":
            return (
                "pos_encoding_mode: 'ALIBI' is not supported by method 'ulysses', on whose ranks "
                "heads are not those that its slopes count; use method='gather'"
            )
        return None
    if has_windows and not spec.causal:
        return (
            f"windows: without causality they are not supported by method {method!r}; use "
            "method='ulysses'"
        )
    is_relative = spec.window_left >= 0 or spec.pos_encoding != "NONE"
    if method == "overlap" and is_relative:
        return (
            "window_left, pos_encoding_mode: are not supported by method 'overlap', which knows no "
            "positions of keys; use method='gather'"
        )
    return None


class _Gathered:
    """Prefill of one planned batch over keys that ranks gather, in one launch a stage.

    Rows that ranks exchange hold a token's keys of all heads, and behind them its values.
    """

    def __init__(
        self,
        group: Group,
        share: ZigZag,
        options: PrefillOptions,
        choice: Choice,
        peers: PeerMemory | None,
    ) -> None:
        self._group, self._options = group, options
        spec = options.spec
        self._plan = make_plan(
            share,
            group.rank,
            choice.method,
            choice.num_chunks,
            causal=spec.causal,
            window_left=spec.window_left,
        )
        self._row_bytes = _key_bytes(options)
        needed = group.size * self._plan.num_sent * self._row_bytes
        self._peers = peers if peers is not None and peers.reserve(max(1, needed)) else None
        # One launch writes each row of the answer, or all leave states of all rows.
        self._has_states = self._plan.method == "overlap" and len(self._plan.stages) > 1
        self._stages = []
        for stage in self._plan.stages:
            raw = {**options.raw, "causal": stage.causal}
            if self._has_states:
                raw["o_dtype"] = "float32"
            wrapper = StageWrapper(group.on_gpu)
            wrapper.plan(
                stage.requests,
                self._plan.num_rows,
                stage.num_keys,
                options.heads_and_dims,
                options.dtype,
                raw,
            )
            self._stages.append(wrapper)
        self._memory: _Memory | None = None

    def run(
        self, q: ArrayView, k: ArrayView, v: ArrayView, out: ArrayView, lse: ArrayView | None
    ) -> None:
        """Write the answer of this rank's tokens, and their LSE where an array is given."""
        if self._memory is None or not self._memory.fits(q):
            self._memory = self._make_memory(q)
        memory, plan = self._memory, self._plan
        stream = array.current_stream(q) if q.device.kind == "cuda" else None
        output = _State(out.owner, None if lse is None else lse.owner)
        own, side = _Keys(k.owner, v.owner), memory.side
        side.enter(stream)
        # --- 1. Let keys be on their way ---
        if plan.num_sent:
            if self._peers is not None:
                side.begin(stream)
                self._peers.begin(side.handle)
            _store(own, memory.sent, memory.send_slots)
        side.begin(stream)
        for chunk, taken in zip(plan.chunks, memory.taken, strict=True):
            if chunk.num_rows:
                self._bring(chunk, memory.send_rows, taken, side.handle)
            side.mark()
        if memory.own_slots is not None and plan.num_rows:
            _store(own, memory.keys, memory.own_slots)
        # --- 2. Attend to what is there by then ---
        come = 0
        for index, stage in enumerate(plan.stages):
            while come < stage.chunks:
                side.wait(stream, come)
                if plan.chunks[come].num_rows:
                    _store(memory.come[come], memory.keys, memory.slots[come])
                come += 1
            keys = own if stage.is_own else memory.keys
            state = memory.states[index] if self._has_states else output
            self._stages[index].attend(q.owner, keys.k, keys.v, state.v, state.s)
        # --- 3. Merge in the order of stages ---
        if self._has_states and plan.num_rows:
            merge_states(memory.merged.v, memory.merged.s, out=output.v, lse=output.s)
        side.leave(stream)

    def _bring(
        self, chunk: Chunk, own: ExchangedRows, taken: ExchangedRows, stream: int | None
    ) -> None:
        """Let every rank have the rows of all ranks."""
        if self._peers is not None:
            offset = self._group.size * chunk.first * self._row_bytes
            self._peers.send(own, chunk.first, chunk.num_rows, offset, stream)
            return
        own_rows = own.bytes(chunk.first, chunk.num_rows)
        all_rows = taken.bytes(0, self._group.size * chunk.num_rows)
        self._group.all_gather(all_rows, own_rows, stream)

    def _make_memory(self, like: ArrayView) -> _Memory:
        place = None if self._peers is None else self._peers.local
        return _Memory(self._plan, self._group.size, self._options, self._has_states, like, place)


class _Keys(NamedTuple):
    """Keys and values of tokens, [n, num_kv_heads, head_dim] each."""

    k: Any
    v: Any


class _State(NamedTuple):
    """An output [n, num_qo_heads, head_dim_vo], and its LSE [n, num_qo_heads] or None."""

    v: Any
    s: Any


def _store(rows: _Keys, target: _Keys, slots: Any) -> None:
    reshape_and_cache(rows.k, rows.v, target.k, target.v, slots)


class _Memory:
    """What runs of a plan write in between, on the device and of the framework of their arrays.

    send_rows, sent    rows for other ranks, and K and V of them
    taken, come        rows of all ranks, and K and V of them, of each chunk
    keys           K and V that stages read
    states, merged  of each stage (v, s), and of all as they are merged
    """

    def __init__(
        self,
        plan: PrefillPlan,
        size: int,
        options: PrefillOptions,
        has_states: bool,
        like: ArrayView,
        window: Any,
    ) -> None:
        self._place = like.device, like.framework
        self._like, self._options = like, options
        num_qo_heads, num_kv_heads, dim_qk, dim_vo = options.heads_and_dims
        row = num_kv_heads * (dim_qk + dim_vo)
        self.side = SideStream(like.device)
        self.send_rows = ExchangedRows(plan.num_sent, row, options.dtype, like)
        self.sent = self._heads_of(self.send_rows)
        self.taken = []
        for chunk in plan.chunks:
            memory = None
            if window is not None and chunk.num_rows:
                memory = window[size * chunk.first * row * options.dtype.itemsize :]
            taken = ExchangedRows(size * chunk.num_rows, row, options.dtype, like, memory)
            self.taken.append(taken)
        self.come = [self._heads_of(rows) for rows in self.taken]
        columns = num_kv_heads * dim_qk, num_kv_heads * dim_vo
        k, v = (ExchangedRows(plan.num_gathered, x, options.dtype, like) for x in columns)
        self.keys = _Keys(k.heads(0, num_kv_heads, dim_qk), v.heads(0, num_kv_heads, dim_vo))
        self.send_slots = self._on_device(plan.send_slots)
        self.own_slots = None if plan.own_slots is None else self._on_device(plan.own_slots)
        self.slots = [self._on_device(chunk.slots) for chunk in plan.chunks]
        self.states: list[_State] = []
        self.merged = _State(None, None)
        if has_states:
            count, rows = len(plan.stages), max(1, plan.num_rows)
            values = array.empty((count, rows, num_qo_heads, dim_vo), dtypes.float32, like)
            sums = array.empty((count, rows, num_qo_heads), dtypes.float32, like)
            rows = plan.num_rows
            self.states = [_State(values[at, :rows], sums[at, :rows]) for at in range(count)]
            self.merged = _State(values.swapaxes(0, 1), sums.swapaxes(0, 1))

    def fits(self, like: ArrayView) -> bool:
        return self._place == (like.device, like.framework)

    def _on_device(self, slots: np.ndarray) -> Any:
        return array.constant(slots, self._like)

    def _heads_of(self, rows: ExchangedRows) -> _Keys:
        """K and V of rows that hold both."""
        _, num_kv_heads, dim_qk, dim_vo = self._options.heads_and_dims
        return _Keys(
            rows.heads(0, num_kv_heads, dim_qk),
            rows.heads(num_kv_heads * dim_qk, num_kv_heads, dim_vo),
        )
