"""The memory of a step's metadata: int32 arrays that keep their addresses, written by one launch.

A form says what a mode needs. All batch sizes of a form share one store: their arrays are leading
parts of its arrays. Nothing is read from the device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_dtype
from ..core import dtypes
from ..core.problem import MAX_LENGTH
from ..engine.call_cache import Argument, CallCache
from ..engine.index_arrays import progression
from ..errors import ArgumentError, UnsupportedError
from ..launch.ops import serving_metadata as launcher
from ..launch.ops.serving_metadata import BEAMS, FLAT, NO_TREE, Outputs, Sizes
from .fill import StepInputs, fill
from .metadata import AttentionMetadata, ForwardMetadata
from .modes import BackendConfig, BatchInfo, ForwardMode
from .step_arrays import view_flat, view_index, view_tree


class StepForm(NamedTuple):
    """What steps with equal memory have in common.

    rows        query tokens of each request; 0: they differ
    max_rows    the most of one
    num_steps   steps of a draft that are prepared together, from first_step on
    len_delta   keys of the first step beyond seq_lens
    branches    None, "tree" or "beams": drafts of a request that do not all see each other
    num_chunks  chunks that rows of one request may lie in; 0: no layer has chunks
    """

    mode: ForwardMode
    rows: int = 1
    max_rows: int = 1
    num_steps: int = 1
    first_step: int = 0
    len_delta: int = 0
    branches: str | None = None
    num_chunks: int = 0


def form_of(
    config: BackendConfig, mode: ForwardMode, max_rows: int, first_step: int, num_steps: int = 1
) -> StepForm:
    """The form of a mode. max_rows: the most query tokens of a request, in ragged modes."""
    rows, delta, branches = 1, 0, None
    if mode is ForwardMode.DRAFT_DECODE:
        if config.has_beams:
            rows, branches = config.topk, "beams"
        else:
            delta = first_step + 1
    elif mode is ForwardMode.TARGET_VERIFY:
        if not config.num_draft_tokens:
            raise ArgumentError("mode: TARGET_VERIFY wants num_draft_tokens of 1 or more")
        rows, delta = config.num_draft_tokens, config.num_draft_tokens
        if config.has_beams:
            branches, delta = "tree", delta if config.tree_form == "mask" else 0
    elif mode.is_ragged:
        rows = 0
    if mode is ForwardMode.IDLE:
        mode = ForwardMode.DECODE
    row_limit, num_chunks = rows or max(1, max_rows), 0
    if not rows:
        row_limit = 1 << (row_limit - 1).bit_length()
    if config.attention_chunk_size is not None and branches is None:
        num_chunks = -(-(row_limit - 1) // config.attention_chunk_size) + 1
    return StepForm(mode, rows, row_limit, num_steps, first_step, delta, branches, num_chunks)


class Tables(NamedTuple):
    """What a backend is made over.

    req_to_token   int32 [num_pool_rows, columns]
    full_to_swa    int32 or int64 [slots], the slot of the second pool for each of the first
    """

    req_to_token: ArrayView
    full_to_swa: ArrayView | None


def view_tables(config: BackendConfig, req_to_token: Any, full_to_swa: Any) -> Tables:
    """Checked. Raises ArgumentError, UnsupportedError."""
    v = array.view(req_to_token, "req_to_token")
    require_dtype(v, dtypes.int32, "req_to_token")
    if len(v.shape) != 2 or 0 in v.shape or v.strides[1] != 1 or v.strides[0] < v.shape[1]:
        raise ArgumentError(
            f"req_to_token: shape {list(v.shape)} with strides {list(v.strides)}; wanted rows "
            "[max_reqs, max_context_len] of contiguous slots"
        )
    if v.framework in ("jax", "dlpack"):
        raise UnsupportedError(
            f"req_to_token: {v.framework} arrays cannot be written in place, as metadata is; pass "
            "torch, CuPy or NumPy arrays"
        )
    if v.shape[0] * v.strides[0] > MAX_LENGTH:
        raise UnsupportedError(f"req_to_token: holds more than {MAX_LENGTH} entries")
    if config.max_context_len > v.shape[1]:
        raise ArgumentError(
            f"max_context_len: {config.max_context_len}, but req_to_token has {v.shape[1]} columns"
        )
    table = None
    if config.is_hybrid:
        if full_to_swa is None:
            raise ArgumentError(
                "full_to_swa: got None; a hybrid wants the slots of its second pool"
            )
        table = view_index(full_to_swa, "full_to_swa")
        array.same_device(req_to_token=v, full_to_swa=table)
    elif full_to_swa is not None:
        raise ArgumentError("full_to_swa: given without is_hybrid; set it, or pass None")
    return Tables(v, table)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What steps of one signature share, whatever their number of requests.

    per_request   (index of an array, its entries along the first axis for each request)
    tree_unit, loc_unit   elements behind the first axis of the mask, and of out_cache_loc
    beams_unit            slots of one request in out_cache_loc
    launches      by the number of requests
    """

    tree_form: int
    is_wide: tuple[bool, ...]
    per_request: tuple[tuple[int, int], ...]
    tree_unit: int
    loc_unit: int
    beams_unit: int
    launches: dict[int, launcher.Prepared] = field(default_factory=dict)


_ARGUMENTS = (
    *("seq_lens", "req_pool_indices", "extend_seq_lens", "encoder_lens", "out_cache_loc"),
    *("tree_mask", "beam_rows"),
)
_SEQ_LENS, _ROWS, _EXTEND, _ENCODER, _LOC, _TREE, _BEAMS = range(7)
_CALLS: CallCache[_Checked] = CallCache(*(Argument(name, 0) for name in _ARGUMENTS))
_keys = itertools.count()


class Store:
    """Metadata of one form, for up to `capacity` requests."""

    def __init__(
        self, config: BackendConfig, form: StepForm, capacity: int, tables: Tables
    ) -> None:
        self.config, self.form, self.tables = config, form, tables
        self.capacity = max(1, capacity)
        self._key = (next(_keys),)
        v = tables.req_to_token
        step, (rows, columns) = v.strides[0], v.shape
        entries = (rows - 1) * step + columns
        self._slots = array.restride(v.owner, "req_to_token", (1, entries), (0, 1))
        # Pages of one token need no table of their own; nor has one where encoder tokens begin.
        self._reads_slots = config.page_size == 1 or config.has_encoder
        self._room = columns
        self._pages = -(-columns // config.page_size)
        self._arrays = self._allocate()
        self._metadata: dict[int, list[ForwardMetadata]] = {}
        self._sizes: dict[int, Sizes] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory that it takes."""
        return sum(4 * math.prod(x.shape) for x in self._arrays.values())

    # --- memory ---

    def _widths(self) -> tuple[int, int]:
        """Entries of a draft row's table for layers with a window, and with chunks."""
        config = self.config
        if self.form.branches is None:
            return 0, 0
        room = self._room
        window, chunk = config.sliding_window_size, config.attention_chunk_size
        return (
            0 if window is None else min(window + 1, room),
            0 if chunk is None else min(chunk, room),
        )

    def _allocate(self) -> dict[str, Any]:
        """Zeroed arrays by the names of Outputs: a table's stale entries are slots that exist.
        Lengths are those of padded requests, so that a graph can be captured at once."""
        form, config, n = self.form, self.config, self.capacity
        rows = n * form.rows
        counts = {"kv_lens": form.num_steps * n}
        if self._reads_slots:
            counts["kv_offsets"] = n
        else:
            counts["page_table"] = n * self._pages
        if not form.rows:
            counts["cu_seqlens_q"] = n + 1
        if config.has_encoder:
            counts |= {"encoder_lens": n, "encoder_offsets": n}
        if config.is_hybrid and form.branches is None:
            counts["swa_table"] = n * self._pages
        if form.num_chunks:
            chunks = form.num_steps * n * form.num_chunks
            names = "chunk_qo_lens", "chunk_qo_offsets", "chunk_kv_lens", "chunk_kv_offsets"
            counts |= dict.fromkeys(names, chunks)
        if form.branches == "beams":
            counts["draft_table"] = rows * self._draft_steps
        elif form.branches and config.tree_form == "mask":
            counts["tree_bits"] = rows * -(-form.rows // 32)
        elif form.branches:
            counts |= {"draft_table": rows * form.rows, "draft_lens": rows}
        for name, width in zip(("window", "chunk"), self._widths(), strict=True):
            if width:
                counts[f"{name}_slots"] = form.num_steps * rows * width
                counts[f"{name}_lens"] = form.num_steps * rows
        arrays = {}
        for name, count in counts.items():
            values = np.zeros(count, np.int32)
            if name in ("kv_lens", "draft_lens", "window_lens", "chunk_lens"):
                values += 1
            if name == "cu_seqlens_q":
                values += np.arange(count, dtype=np.int32) * form.max_rows
            if name == "tree_bits":
                values -= 1
            arrays[name] = array.from_numpy(values, self.tables.req_to_token)
        return arrays

    @property
    def _draft_steps(self) -> int:
        return max(1, self.config.num_draft_steps, self.form.first_step + self.form.num_steps)

    def sizes(self, bs: int) -> Sizes:
        """The constants of a launch over bs requests."""
        sizes = self._sizes.get(bs)
        if sizes is not None:
            return sizes
        form, config, v = self.form, self.config, self.tables.req_to_token
        table = self.tables.full_to_swa
        chunk = config.attention_chunk_size or 0
        window = -1 if config.sliding_window_size is None else config.sliding_window_size
        on_slots = not config.is_hybrid and (self._reads_slots or chunk % config.page_size != 0)
        is_beams = form.branches == "beams"
        widths = self._widths()
        sizes = self._sizes[bs] = Sizes(
            pool_stride=v.strides[0],
            num_pool_rows=v.shape[0],
            room=self._room,
            map_size=0 if table is None else table.shape[0],
            page_stride=self._pages,
            swa_stride=self._pages,
            chunk_stride=self._pages,
            num_requests=bs,
            rows=form.rows,
            num_steps=form.num_steps,
            len_delta=form.len_delta,
            page_size=config.page_size,
            chunk_size=chunk,
            num_chunks=form.num_chunks,
            chunk_page=1 if on_slots else config.page_size,
            chunks_are_slots=int(on_slots),
            window=window,
            swa_window=window,
            swa_chunk=chunk,
            first_step=form.first_step,
            draft_steps=self._draft_steps,
            draft_width=self._draft_steps if is_beams else form.rows,
            tree_form=0,
            window_width=widths[0],
            chunk_width=widths[1],
        )
        return sizes

    # --- what a step writes ---

    def write(self, batch: BatchInfo, bs: int) -> None:
        """Write the metadata of a batch of bs requests: one launch."""
        if bs == 0:
            return
        form = self.form
        arrays: tuple[Any, ...] = batch.seq_lens, batch.req_pool_indices
        num_real = bs
        if form.branches is not None or not form.rows or self.config.has_encoder:
            arrays += (
                None if form.rows else batch.extend_seq_lens,
                batch.encoder_lens if self.config.has_encoder else None,
            )
        if form.branches is not None:
            draft = batch.draft
            if draft is None:
                raise ArgumentError("draft: got None; wanted the drafts of this mode")
            if draft.num_real is not None:
                num_real = min(bs, draft.num_real)
            if form.branches == "tree":
                arrays += None, draft.tree_mask
            else:
                arrays += batch.out_cache_loc, None, draft.beam_rows
        if not self._write_cached(arrays, bs, num_real):
            self._write(arrays, bs, num_real)

    def _write_cached(self, arrays: tuple[Any, ...], bs: int, num_real: int) -> bool:
        hit = _CALLS.lookup(arrays, self._key)
        if hit is None:
            return False
        cached, addresses = hit
        call, lengths = cached.call, cached.lengths
        checked = call.checked
        prepared = cached.prepared
        if prepared is None:
            if any(lengths[index] != bs * unit for index, unit in checked.per_request):
                return False
            prepared = cached.prepared = self._launch_for(checked, bs)
        tree_size = 0
        if checked.beams_unit:
            count, rest = divmod(lengths[_LOC] * checked.loc_unit, checked.beams_unit)
            if rest or count > bs:
                return False
            num_real = min(num_real, count)
        elif checked.tree_unit:
            tree_size = lengths[_TREE] * checked.tree_unit
        prepared.enqueue(call.current_stream(), addresses, tree_size, num_real)
        return True

    def _launch_for(self, checked: _Checked, bs: int) -> launcher.Prepared:
        """The launch over bs requests."""
        prepared = checked.launches.get(bs)
        if prepared is None:
            v, table = self.tables
            over = (0, 0) if table is None else (table.ptr, int(table.dtype is dtypes.int64))
            addresses = {name: array.view(x, name).ptr for name, x in self._arrays.items()}
            prepared = checked.launches[bs] = launcher.prepare(
                Outputs(**addresses),
                self.sizes(bs)._replace(tree_form=checked.tree_form),
                self._columns(),
                v.device.index,
                checked.is_wide,
                (*over, v.ptr),
            )
        return prepared

    def _write(self, arrays: tuple[Any, ...], bs: int, num_real: int) -> None:
        # --- 1. Validate ---
        signature, arrays = arrays, (*arrays, *[None] * (len(_ARGUMENTS) - len(arrays)))
        views, tree_form = self._views(arrays, bs)
        v = self.tables.req_to_token
        named = dict(zip(_ARGUMENTS, views, strict=True))
        array.same_device(req_to_token=v, **named)
        loc, tree = views[_LOC], views[_TREE]
        sizes = self.sizes(bs)._replace(tree_form=tree_form)
        if loc is not None:
            num_real = min(num_real, loc.shape[0] // (self.form.rows * self._draft_steps))
        # --- 2. Write on the CPU ---
        if v.device.kind == "cpu":
            numbers: dict[str, Any] = {
                name: None if x is None else array.as_numpy(x) for name, x in named.items()
            }
            table = self.tables.full_to_swa
            own = StepInputs(
                **numbers,
                full_to_swa=None if table is None else array.as_numpy(table),
                req_to_token=array.as_numpy(v),
                num_real=num_real,
            )
            outputs = {
                name: array.as_numpy(array.view(x, name)) for name, x in self._arrays.items()
            }
            fill(outputs, own, sizes, tree_form)
            return
        # --- 3. Launch on the caller's stream ---
        used = [x for x in views if x is not None]
        checked = self._checked(arrays, views, tree_form, bs)
        prepared = self._launch_for(checked, bs)
        addresses = [0 if x is None else x.ptr for x in views]
        like = views[_SEQ_LENS]
        assert like is not None
        array.acquire(like, *used)
        size = 0 if tree is None else tree.shape[0] * checked.tree_unit
        prepared.enqueue(array.current_stream(like), addresses, size, num_real)
        array.release(like, *used)
        _CALLS.insert(signature, self._key, checked, like, dtypes.int32, None, None)

    def _checked(
        self, arrays: tuple[Any, ...], views: list[ArrayView | None], tree_form: int, bs: int
    ) -> _Checked:
        """What later steps with arrays like these share."""
        tree, loc = arrays[_TREE], arrays[_LOC]
        units = [
            (index, 1)
            for index in (_SEQ_LENS, _ROWS, _EXTEND, _ENCODER)
            if arrays[index] is not None
        ]
        for index in (_TREE, _BEAMS):
            if arrays[index] is not None and not (index == _TREE and tree_form == FLAT):
                units.append((index, arrays[index].shape[0] // bs))
        return _Checked(
            tree_form,
            tuple(x is not None and x.dtype is dtypes.int64 for x in views[: _LOC + 1]),
            tuple(units),
            0 if tree is None else math.prod(tree.shape[1:]),
            0 if loc is None else math.prod(loc.shape[1:]),
            0 if loc is None else self.form.rows * self._draft_steps,
        )

    def _columns(self) -> int:
        """Entries of the tables that blocks of one request share."""
        count = 0 if self._reads_slots else self._pages
        if "swa_table" in self._arrays:
            count = max(count, self._pages)
        rows = self.form.num_steps * self.form.rows
        return max(count, rows * sum(self._widths()))

    def _views(self, arrays: tuple[Any, ...], bs: int) -> tuple[list[ArrayView | None], int]:
        """Checked views of a step's arrays, and the form of its mask."""
        form, rows = self.form, self.form.rows
        views: list[ArrayView | None] = [None] * len(arrays)
        for index in (_SEQ_LENS, _ROWS, _EXTEND, _ENCODER):
            name, x = _ARGUMENTS[index], arrays[index]
            is_wanted = index < _EXTEND or (
                not rows if index == _EXTEND else self.config.has_encoder
            )
            if x is None and is_wanted:
                raise ArgumentError(f"{name}: got None; wanted int32 or int64 [{bs}]")
            if x is not None:
                views[index] = view_index(x, name, bs)
        tree_form = NO_TREE
        if form.branches == "beams":
            tree_form = BEAMS
            if arrays[_LOC] is None:
                raise ArgumentError(
                    "out_cache_loc: got None; wanted the slots of all drafted tokens, [bs, topk, "
                    "num_draft_steps]"
                )
            unit = rows * self._draft_steps
            views[_LOC] = loc = view_flat(arrays[_LOC], "out_cache_loc")
            if loc.shape[0] % unit or loc.shape[0] > bs * unit:
                raise ArgumentError(
                    f"out_cache_loc: holds {loc.shape[0]} slots; wanted {unit} for each of {bs} "
                    f"requests, [bs, {rows}, {self._draft_steps}]"
                )
            if arrays[_BEAMS] is not None:
                views[_BEAMS] = beams = view_flat(arrays[_BEAMS], "beam_rows")
                require_dtype(beams, dtypes.int32, "beam_rows")
                if beams.shape[0] != bs * unit:
                    raise ArgumentError(
                        f"beam_rows: holds {beams.shape[0]} beams; wanted [{bs * rows}, "
                        f"{self._draft_steps}]"
                    )
        elif form.branches == "tree":
            views[_TREE], tree_form = view_tree(arrays[_TREE], bs, rows)
        return views, tree_form

    # --- what attention reads ---

    def metadata(self, bs: int, step: int) -> ForwardMetadata:
        """The metadata of a step of draft decode, else step first_step, of a batch of bs."""
        steps = self._metadata.get(bs)
        if steps is None:
            steps = [self._make(bs, index) for index in range(self.form.num_steps)]
            self._metadata[bs] = steps
        return steps[step - self.form.first_step]

    def _make(self, bs: int, index: int) -> ForwardMetadata:
        form, config = self.form, self.config
        get = self._arrays.get
        # Beams share the keys before their drafts, whatever the step is.
        own = 0 if form.branches == "beams" else index
        kv_lens = self._arrays["kv_lens"][own * bs : (own + 1) * bs]
        offsets = get("kv_offsets")
        common: dict[str, Any] = {
            "q_len": form.rows,
            "max_seqlen_q": form.max_rows,
            "max_seqlen_k": self._room,
        }
        if not form.rows:
            common["cu_seqlens_q"] = self._arrays["cu_seqlens_q"][: bs + 1]
        if offsets is not None:
            main = AttentionMetadata(kv_lens, self._slots, 1, offsets[:bs], **common)
        else:
            pages = self._arrays["page_table"].reshape(self.capacity, self._pages)[:bs]
            main = AttentionMetadata(kv_lens, pages, config.page_size, **common)
        swa = encoder = local = None
        if get("swa_table") is not None:
            pages = self._arrays["swa_table"].reshape(self.capacity, self._pages)[:bs]
            swa = AttentionMetadata(kv_lens, pages, config.page_size, uses_swa_pool=True, **common)
        if config.has_encoder:
            lens, starts = (self._arrays[f"encoder_{x}"][:bs] for x in ("lens", "offsets"))
            encoder = AttentionMetadata(lens, self._slots, 1, starts, **common)
        if form.num_chunks:
            local = self._local(bs, index, main, swa)
        metadata = ForwardMetadata(
            form.mode,
            bs,
            main,
            swa,
            local,
            encoder,
            len_offset=form.len_delta + own,
            step=form.first_step + index,
            max_context_len=config.max_context_len,
        )
        if form.branches is not None:
            self._add_drafts(metadata, bs, index)
        return metadata

    def _local(
        self, bs: int, index: int, main: AttentionMetadata, swa: AttentionMetadata | None
    ) -> AttentionMetadata:
        form, sizes = self.form, self.sizes(bs)
        count = bs * form.num_chunks
        low, high = index * count, (index + 1) * count
        chunks = {
            name: self._arrays[f"chunk_{name}"][low:high]
            for name in ("qo_lens", "qo_offsets", "kv_lens", "kv_offsets")
        }
        table: Any = self._slots
        if not sizes.chunks_are_slots:
            whole = self._arrays["page_table" if swa is None else "swa_table"]
            table = array.restride(whole, "page_table", (1, math.prod(whole.shape)), (0, 1))
        is_single = form.rows == 1
        chunk = sizes.chunk_size
        return AttentionMetadata(
            chunks["kv_lens"],
            table,
            sizes.chunk_page,
            chunks["kv_offsets"],
            q_len=int(is_single),
            qo_offsets=None if is_single else chunks["qo_offsets"],
            qo_lens=None if is_single else chunks["qo_lens"],
            max_seqlen_q=min(form.max_rows, chunk),
            max_seqlen_k=min(chunk, main.max_seqlen_k),
            uses_swa_pool=swa is not None,
        )

    def _add_drafts(self, metadata: ForwardMetadata, bs: int, index: int) -> None:
        form, rows = self.form, bs * self.form.rows
        if form.branches == "beams":
            width, step = self._draft_steps, form.first_step + index
            lens: Any = progression(rows, step + 1, 0, self.tables.req_to_token)
            table = self._arrays["draft_table"][: rows * width].reshape(rows, width)
            metadata.expand = AttentionMetadata(lens, table, 1, max_seqlen_k=width)
        elif "tree_bits" in self._arrays:
            words = -(-form.rows // 32)
            bits = self._arrays["tree_bits"][: rows * words].reshape(rows, words)
            metadata.main = replace(metadata.main, tree_mask=bits)
        else:
            lens = self._arrays["draft_lens"][:rows]
            table = self._arrays["draft_table"][: rows * form.rows].reshape(rows, form.rows)
            metadata.expand = AttentionMetadata(lens, table, 1, max_seqlen_k=form.rows)
        for name, width in zip(("window", "chunk"), self._widths(), strict=True):
            if width:
                low, high = index * rows, (index + 1) * rows
                slots = self._arrays[f"{name}_slots"][low * width : high * width]
                own = AttentionMetadata(
                    self._arrays[f"{name}_lens"][low:high],
                    slots.reshape(rows, width),
                    1,
                    max_seqlen_k=width,
                    uses_swa_pool=self.config.is_hybrid,
                )
                setattr(metadata, f"{name}_rows", own)
