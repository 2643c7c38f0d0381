"""What calls of latent attention without a plan are told, and what checks make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..core import dtypes, parse
from ..core.parse import require_int
from ..errors import ArgumentError
from ..launch.attention.plan_batch import Lengths
from .geometry import Geometry
from .latent_rows import Dims, Parts
from .views import merge_leading, next_power_of_two, number_or_array


class Names(NamedTuple):
    """What a function calls its arguments, for messages."""

    q: str = "query"
    q_rope: str = "query[1]"
    k: str = "kv_cache"
    k_rope: str = "kv_cache[1]"
    block_tables: str = "block_tables"
    kv_lens: str = "seq_lens"
    qo_offsets: str = "cum_seq_lens_q"
    kv_offsets: str = "kv_offsets"
    sm_scale: str = "bmm1_scale"
    output_scale: str = "bmm2_scale"
    out: str = "out"


NAMES = Names()


class Options(NamedTuple):
    """What else decides about a call, as given, where it is hashable.

    dims         columns of the two parts
    q_axes       how many dimensions q may have
    q_len        rows of each request; 0: qo_offsets say
    max_q_len    the most of one request; None: unknown
    max_kv_len   the same of its keys: it bounds how often keys are worth splitting
    most_kv_len  with kv_offsets, the most keys of a request: more are cut. None: as many as the
                 table has room for
    is_list      block_tables names keys
    key_scales   of the cache (core.problem.KEY_SCALES): "" or "rows"
    pads_lse     the LSE is [B, heads, q_len]; else like q
    natural_lse  it has natural logarithms; else base 2. One that is padded must
    lse_form     flags of params.LSE_WITHOUT_SINKS, params.LSE_OF_NO_KEYS_IS_INFINITE
    request_tokens  of lists: tokens in turn that are one request of kv_lens
    counts_later a token counts one entry of its list less for each token of its request behind it;
                 kv_lens may be larger than lists
    """

    names: Names
    dims: Dims
    sm_scale: float
    q_axes: tuple[int, ...] = (3,)
    q_len: int = 1
    max_q_len: int | None = None
    max_kv_len: int | None = None
    output_scale: float = 1.0
    rope_scale: float = 1.0
    causal: bool = True
    is_list: bool = False
    pads_lse: bool = False
    natural_lse: bool = False
    return_lse: bool = False
    o_dtype: Any = None
    key_scales: str = ""
    most_kv_len: int | None = None
    lse_form: int = 0
    request_tokens: int = 1
    counts_later: bool = False


@dataclass(slots=True)
class Call:
    """A checked call. Views of q, out and lse have their leading axes merged; a padded LSE is
    viewed as [B, q_len, heads], or [B, heads] of one row each.

    kv_lens  None where block_tables names keys, and all of them count
    gaps     elements of q, of q_rope and of block_tables between the requests of the caller, beside
             the strides of their tokens
    """

    options: Options
    queries: Parts
    pages: Parts
    table: ArrayView
    kv_lens: ArrayView | None
    qo_offsets: ArrayView | None
    kv_offsets: ArrayView | None
    out: ArrayView | None
    lse: ArrayView | None
    sinks: ArrayView | None
    scales: tuple[ArrayView | None, ArrayView | None]
    geometry: Geometry
    lengths: Lengths
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    gaps: tuple[int, int, int] = (0, 0, 0)
    max_logits: ArrayView | None = None
    spread: tuple[ArrayView, ...] = ()
    mask: ArrayView | None = None
    mask_bits: int = 0

    @property
    def rows(self) -> ArrayView:
        """The queries."""
        return self.queries.latent

    @property
    def names(self) -> Names:
        return self.options.names

    @property
    def inputs(self) -> dict[str, ArrayView | None]:
        """The arrays that the call reads, by what messages call them."""
        names = self.options.names
        return {
            **self.queries.views,
            **self.pages.views,
            names.block_tables: self.table,
            names.kv_lens: self.kv_lens,
            names.qo_offsets: self.qo_offsets,
            names.kv_offsets: self.kv_offsets,
            "sinks": self.sinks,
            names.sm_scale: self.scales[0],
            names.output_scale: self.scales[1],
            **{f"{names.q} {place}": x for place, x in enumerate(self.spread)},
        }

    @property
    def launches(self) -> bool:
        """Whether there is something to write."""
        return self.queries.latent.shape[0] > 0

    @property
    def return_lse(self) -> bool:
        return self.options.return_lse

    def view_lse(self, lse: Any) -> ArrayView:
        """An LSE with the heads last, and leading axes merged where they are those of q: [rows,
        heads], else [B, rows of each, heads]."""
        v = array.view(lse, "lse")
        if not self.options.pads_lse:
            return merge_leading(v, "lse", 1)
        (count, heads, rows), (step, of_head, of_row) = v.shape, v.strides
        if rows == 1 == self.options.q_len:
            return array.as_strided(v, (count, heads), (step, of_head))
        return array.as_strided(v, (count, rows, heads), (step, of_row, of_head))


def read_scale(scale: Any, name: str) -> tuple[float, Any]:
    """(number, array of one element or None) of a scale; one on the host is read."""
    number, held = number_or_array(scale)
    if held is None:
        return parse.finite(number, name, 1.0), None
    v = array.view(held, name)
    if math.prod(v.shape) != 1 or v.dtype is not dtypes.float32:
        raise ArgumentError(
            f"{name}: got {v.dtype} {list(v.shape)}; wanted a number, or a float32 array of one"
        )
    if v.device.kind == "cpu":
        return parse.finite(float(array.as_numpy(v).ravel()[0]), name, 1.0), None
    return 1.0, held


def bounded(max_kv_len: Any, name: str) -> int | None:
    """A bound of lengths, rounded up, so that calls of growing requests have equal signatures."""
    if max_kv_len is None:
        return None
    return int(next_power_of_two(require_int(max_kv_len, name, 0, 2**32)))
