"""What a rank sends, where it puts what it gets, and which rows attend to which keys.

Functions of integers alone. A rank has two pieces of each request (pieces.py); its rows attend to
keys of its own and of other ranks, which come in chunks. A stage is one launch over the keys that
are there by then.

Two ways lead to the answer:

- "gather": a stage has whole rows. The keys of all ranks are put in order of position, so that the
  rows of a piece, which are the last of the keys they see, are an ordinary request. In two chunks
  the early pieces come first, and attend while the late ones are on their way. Nothing is merged.
- "overlap": the first stage is a rank's own tokens among themselves. Each later one has the keys of
  a chunk, of which rows see all or none; the order of keys does not matter then. Every stage
  leaves a state, and all are merged in the order of stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedule.batch import BatchRequests
from .pieces import ZigZag, expand


class Segments(NamedTuple):
    """Runs of tokens that lie together in a rank's rows, as int64 [B, pieces] each.

    row        the first one's place in the rank's rows
    position   its position in the request
    length     how many there are
    """

    row: np.ndarray
    position: np.ndarray
    length: np.ndarray

    def within(self, begin: np.ndarray, end: np.ndarray) -> Segments:
        """The parts whose positions are in [begin, end), of each request."""
        first = np.maximum(self.position, begin[:, None])
        last = np.minimum(self.position + self.length, end[:, None])
        skipped = first - self.position
        return Segments(self.row + skipped, first, np.maximum(last - first, 0))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Keys that ranks exchange in one collective.

    num_rows   that every rank gives; ranks that have fewer leave the rest as it is
    first      the first of them among the rows that a rank gives, all chunks one after another
    slots      int32 [size * num_rows]: where each row that comes goes among the gathered keys; -1:
               nowhere
    """

    num_rows: int
    first: int
    slots: np.ndarray


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch.

    chunks     how many chunks have to be there
    requests   rows of q, and where their keys are: in the rank's own k and v (`is_own`), or among
               the gathered ones
    num_keys   that the requests reach
    causal     whether rows see keys up to their position only
    """

    chunks: int
    requests: BatchRequests
    num_keys: int
    is_own: bool
    causal: bool


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What one rank does.

    method       "gather" or "overlap"
    num_rows     of the rank's q, k and v
    send_slots   int32 [num_rows]: where each of its keys goes among the rows that it gives; -1:
                 no other rank needs it
    own_slots    int32 [num_rows]: where it goes among the gathered keys; None: nowhere
    num_sent     rows that the rank gives, in all chunks
    num_gathered   the most gathered keys that a stage reads
    """

    method: str
    num_rows: int
    send_slots: np.ndarray
    own_slots: np.ndarray | None
    num_sent: int
    num_gathered: int
    chunks: tuple[Chunk, ...]
    stages: tuple[Stage, ...]


def make_plan(
    share: ZigZag, rank: int, method: str, num_chunks: int, causal: bool, window_left: int = -1
) -> PrefillPlan:
    """The plan of a rank. num_chunks is 1 or even; "gather" has one chunk or two.

    window_left needs "gather" and causality: what a row sees then ends at its own position.
    """
    if share.size == 1:
        return _alone(share, causal)
    sent = [
        [_sent(share, source, chunk, num_chunks, window_left) for source in range(share.size)]
        for chunk in range(num_chunks)
    ]
    sizes = [max(int(x.length.sum()) for x in of_ranks) for of_ranks in sent]
    firsts = [sum(sizes[:chunk]) for chunk in range(num_chunks)]
    send_slots = np.full(int(share.counts(rank).sum()), -1, np.int32)
    for of_ranks, first in zip(sent, firsts, strict=True):
        own = of_ranks[rank]
        _place(send_slots, own.row, first + _starts(own.length), own.length)
    lay_out = _lay_out_whole if method == "gather" else _lay_out_parts
    slots, own_slots, stages = lay_out(share, rank, sent, causal, window_left)
    chunks = tuple(map(Chunk, sizes, firsts, slots))
    num_gathered = max((stage.num_keys for stage in stages if not stage.is_own), default=0)
    return PrefillPlan(
        method,
        send_slots.size,
        send_slots,
        own_slots,
        sum(sizes),
        num_gathered,
        chunks,
        tuple(stages),
    )


def _alone(share: ZigZag, causal: bool) -> PrefillPlan:
    """The plan of a group of one rank."""
    stage = _own_stage(share, 0, causal)
    none = np.full(share.num_tokens, -1, np.int32)
    return PrefillPlan("overlap", share.num_tokens, none, None, 0, 0, (), (stage,))


def _own_stage(share: ZigZag, rank: int, causal: bool) -> Stage:
    """A rank's tokens among themselves: in order of position, so causality is as in a prompt."""
    counts, indptr = share.counts(rank), share.indptr(rank)
    requests = BatchRequests(counts, counts, indptr[:-1], indptr[:-1])
    return Stage(0, requests, int(indptr[-1]), is_own=True, causal=causal)


# --- what ranks give ---


def _sent(share: ZigZag, rank: int, chunk: int, num_chunks: int, window_left: int) -> Segments:
    """The keys that a rank gives in a chunk: a part of its early pieces, or of its late ones.

    Under a window nobody else sees more of a piece than its end.
    """
    begin, end = share.spans(rank)
    length = end - begin
    row = share.indptr(rank)[:-1, None] + np.stack([np.zeros_like(length[:, 0]), length[:, 0]], 1)
    if num_chunks == 1:
        first, last = np.zeros_like(length), length
    else:
        half = num_chunks // 2
        part = np.array([chunk, chunk - half])
        first = np.where((part >= 0) & (part < half), length * part // half, 0)
        last = np.where((part >= 0) & (part < half), length * (part + 1) // half, 0)
    if window_left >= 0:
        first = np.minimum(np.maximum(first, length - window_left), last)
    return Segments(row + first, begin + first, last - first)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each of the lengths begins if all lie one after another, in their shape."""
    in_order = lengths.ravel()
    return (in_order.cumsum() - in_order).reshape(lengths.shape)


def _place(slots: np.ndarray, rows: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> None:
    """Let rows[i] and the rows behind it go to targets[i] and the slots behind it."""
    rows, targets, lengths = rows.ravel(), targets.ravel(), lengths.ravel()
    slots[expand(rows, lengths)] = expand(targets, lengths)


# --- whole rows ---


def _lay_out_whole(
    share: ZigZag, rank: int, sent: list[list[Segments]], causal: bool, window_left: int
) -> tuple[list[np.ndarray], np.ndarray, list[Stage]]:
    """(slots of each chunk, slots of the rank's own keys, stages) of "gather"."""
    begin, end = share.spans(rank)
    qo_len = end - begin
    first, last = np.zeros_like(begin), end
    if not causal:
        last = np.repeat(share.lengths[:, None], 2, axis=1)
    elif window_left >= 0:
        first = np.maximum(begin - window_left, 0)
    # Rows that are not there need no keys.
    first = np.where(qo_len > 0, first, 0)
    last = np.where(qo_len > 0, last, 0)
    # Keys of the early piece come first, and behind them what the late piece needs besides.
    more = np.maximum(first[:, 1], last[:, 0])
    kept = (last[:, 0] - first[:, 0]) + np.maximum(last[:, 1] - more, 0)
    base = _starts(kept)
    behind = base + last[:, 0] - first[:, 0]
    ranges = ((first[:, 0], last[:, 0], base), (more, last[:, 1], behind))

    def place_range(slots: np.ndarray, segments: Segments, offset: np.ndarray) -> None:
        for low, high, target in ranges:
            seen = segments.within(low, high)
            rows = offset + (seen.row - segments.row)
            _place(slots, rows, target[:, None] + seen.position - low[:, None], seen.length)

    all_slots = []
    for of_ranks in sent:
        size = max(int(x.length.sum()) for x in of_ranks)
        slots = np.full(share.size * size, -1, np.int32)
        for source, segments in enumerate(of_ranks):
            if source != rank:
                place_range(slots, segments, source * size + _starts(segments.length))
        all_slots.append(slots)
    own_slots = np.full(int(qo_len.sum()), -1, np.int32)
    row = share.indptr(rank)[:-1, None] + np.stack([np.zeros_like(base), qo_len[:, 0]], 1)
    place_range(own_slots, Segments(row, begin, qo_len), row)
    is_among = first[:, 1] < last[:, 0]  # whether the late piece's keys begin in the early one's
    late_start = np.where(is_among, base + first[:, 1] - first[:, 0], behind)
    kv_start = np.stack([base, late_start], axis=1)
    kv_len = last - first
    stages = []
    pieces = ((0, 1),) if len(sent) == 1 or not causal else ((0,), (1,))
    for chunks, piece in enumerate(pieces, 1 if len(pieces) > 1 else len(sent)):
        chosen = [x[:, piece] for x in (qo_len, kv_len, row, kv_start)]
        stages.append(_stage(chunks, chosen, causal))
    return all_slots, own_slots, stages


# --- states ---


def _lay_out_parts(
    share: ZigZag, rank: int, sent: list[list[Segments]], causal: bool, window_left: int
) -> tuple[list[np.ndarray], None, list[Stage]]:
    """(slots of each chunk, None, stages) of "overlap"."""
    assert window_left < 0
    begin, end = share.spans(rank)
    qo_len = end - begin
    rows = share.indptr(rank)[:-1]
    all_slots, stages = [], [_own_stage(share, rank, causal)]
    for chunk, of_ranks in enumerate(sent):
        size = max(int(x.length.sum()) for x in of_ranks)
        others = [source for source in range(share.size) if source != rank]
        lengths = np.stack([of_ranks[source].length for source in others], axis=1)  # [B, others, 2]
        pieces = np.array([share.pieces(source) for source in others])
        early, late = (pieces < own if causal else pieces >= 0 for own in share.pieces(rank))
        # Keys that both of the rank's pieces see come first, then those for the late one alone.
        kinds = np.stack([lengths * early, lengths * (late & ~early)], axis=1)
        kinds[:, 0] *= (qo_len.sum(axis=1) > 0)[:, None, None]
        kinds[:, 1] *= (qo_len[:, 1] > 0)[:, None, None]
        targets = _starts(kinds)
        slots = np.full(share.size * size, -1, np.int32)
        for at, source in enumerate(others):
            offset = source * size + _starts(of_ranks[source].length)
            for kind in (0, 1):
                _place(slots, offset, targets[:, kind, at], kinds[:, kind, at])
        all_slots.append(slots)
        by_kind = kinds.sum(axis=(2, 3))
        kv_start, kv_len = _starts(by_kind.sum(axis=1)), by_kind.cumsum(axis=1)
        stages.append(_part_stage(chunk + 1, qo_len, rows, kv_start, kv_len, causal))
    return all_slots, None, stages


def _part_stage(
    chunks: int,
    qo_len: np.ndarray,
    rows: np.ndarray,
    kv_start: np.ndarray,
    kv_len: np.ndarray,
    causal: bool,
) -> Stage:
    """A launch over keys of other ranks: a request for each piece, or for both if all see all."""
    if causal:
        starts = np.stack([rows, rows + qo_len[:, 0]], axis=1)
        fields = [qo_len, kv_len, starts, np.repeat(kv_start[:, None], 2, axis=1)]
    else:
        fields = [qo_len.sum(axis=1), kv_len[:, 1], rows, kv_start]
    return _stage(chunks, fields, causal=False)


def _stage(chunks: int, fields: list[np.ndarray], causal: bool) -> Stage:
    """A launch over gathered keys of the requests that have rows.

    fields: qo_len, kv_len, q_start and kv_start, of one shape.
    """
    has_rows = fields[0].ravel() > 0
    qo_len, kv_len, q_start, kv_start = (x.ravel()[has_rows] for x in fields)
    requests = BatchRequests(qo_len, kv_len, q_start, kv_start)
    num_keys = int((kv_start + kv_len).max(initial=0))
    return Stage(chunks, requests, num_keys, is_own=False, causal=causal)
