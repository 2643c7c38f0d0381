"""What a call by lists launches: nothing is planned, so lengths and lists stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..array import ArrayView
from ..launch.attention.key_list_arrays import ListAddresses, Lists
from ..launch.attention.key_lists import ListLauncher
from ..launch.driver import params, scratch
from . import output_gate
from .arrays import Arrays
from .check_planless import Call, Indices
from .geometry import Variant
from .kv_cache import pack_strides
from .prepared import Launches, is_aligned

# Places of addresses, which come in the order of Arrays.
_Q = Arrays._fields.index("q")
_K = Arrays._fields.index("k")
_V = Arrays._fields.index("v")
_TABLE = Arrays._fields.index("block_tables")
_KV_LENS = Arrays._fields.index("kv_lens")
_OUT = Arrays._fields.index("out")
_LSE = Arrays._fields.index("lse")
_QO_OFFSETS = Arrays._fields.index("qo_offsets")
_KV_OFFSETS = Arrays._fields.index("kv_offsets")
_SINKS = Arrays._fields.index("sinks")
_GATE = Arrays._fields.index("output_gate")
_SCALE_K = Arrays._fields.index("scale_k")
_SCALE_V = Arrays._fields.index("scale_v")
_LISTS = Arrays._fields.index("lists")


@dataclass(slots=True, eq=False)
class PreparedLists(Launches):
    """The launches of attention by lists.

    lists         what they are told of lists
    strides       params.STRIDES
    num_tokens    rows of q
    scale_steps   params.STEPS
    gate_strides  empty without gates of the output
    """

    launcher: ListLauncher
    lists: Lists
    strides: bytes
    num_tokens: int
    scale_steps: bytes
    gate_strides: tuple[int, ...] = ()

    def launch(
        self, addresses: Sequence[int], stream: int, allocate: scratch.Allocate, words: int = 0
    ) -> None:
        gate, kv_lens, kv_offsets = addresses[_GATE], addresses[_KV_LENS], addresses[_KV_OFFSETS]
        at = ListAddresses(
            q=addresses[_Q],
            k=addresses[_K],
            v=addresses[_V],
            o=addresses[_OUT],
            entries=addresses[_LISTS],
            kv_lens=kv_lens or kv_offsets,
            table=addresses[_TABLE],
            qo_offsets=addresses[_QO_OFFSETS],
            kv_offsets=kv_offsets,
            key_scales=addresses[_SCALE_K],
            value_scales=addresses[_SCALE_V],
        )
        read = params.NO_LOGITS_ARRAYS
        if gate:
            read = params.with_output_gate(read, gate, self.gate_strides)
        lse, sinks, scale_k = addresses[_LSE], addresses[_SINKS], addresses[_SCALE_K]
        optional = params.OPTIONAL.pack(lse, 0, sinks, 0, scale_k, 0, 0, self.scale_steps, read)
        tokens = self.num_tokens
        self.launcher.launch(at, self.lists, optional, self.strides, tokens, stream, allocate)


def prepare_lists(call: Call) -> PreparedLists:
    """The launches of a call that has lists."""
    form, lists, scales = call.options.key_lists, call.lists, call.scales
    assert form is not None and lists is not None and call.out is not None
    is_scaled = not (scales.views[0] is scales.views[1] is None)
    variant = Variant(
        is_aligned(call),
        is_scaled or scales.logits <= 0.0,
        output_gate=output_gate.kind_of(call.output_gate),
    )
    spec, (_, groups, entries) = call.geometry.spec, lists.shape
    is_of_query_heads = groups == spec.num_qo_heads > spec.num_kv_heads
    launcher = call.geometry.list_launcher(variant, is_of_query_heads, scales.output)
    table, lse_strides = call.block_tables, (0, 0) if call.lse is None else call.lse.strides
    k_token, k_head, v_token, v_head, k_page, v_page = call.keys.strides
    if table is None and call.indices.kv_offsets is not None:
        # Offsets count rows: a request's keys begin so many rows, not pages, behind the first.
        k_page, v_page = k_token, v_token
    keys = k_token, k_head, v_token, v_head, k_page, v_page
    return PreparedLists(
        launcher,
        Lists(
            length=entries,
            granularity=form.granularity,
            stride_n=lists.strides[0],
            stride_group=lists.strides[1] if groups > 1 else 0,
            num_requests=call.lengths.num_requests,
            max_kv_len=call.lengths.max_kv_len,
            window=form.window,
            request_tokens=0 if call.form.has_qo_offsets else max(call.lengths.qo_len, 1),
            kv_step=0 if table is None else table.strides[0],
            is_causal=form.is_causal,
            kv_lens_are_steps=call.indices.kv_lens is call.indices.kv_offsets,
            num_pages=call.keys.size,
            steps=_length_steps(call.indices),
            k_scale_step=_head_step(scales.views[1]),
            v_scale_step=_head_step(scales.views[2]),
            k_scale_request_step=scales.steps[1],
            v_scale_request_step=scales.steps[2],
        ),
        strides=pack_strides(call.q, keys, call.out, lse_strides),
        num_tokens=call.q.shape[0],
        scale_steps=params.STEPS.pack(0, 0, scales.steps[1], 0),
        gate_strides=() if call.output_gate is None else call.output_gate.strides,
        device_index=launcher.device_index,
        num_bytes=0,
        lse_shape=call.lse_shape,
    )


def _length_steps(indices: Indices) -> tuple[int, int, int]:
    """Words of 32 bits from one to the next of lengths and offsets."""
    views = indices.kv_lens, indices.qo_offsets, indices.kv_offsets
    kv_lens, qo_offsets, kv_offsets = (
        1 if v is None else v.strides[0] * (v.dtype.itemsize // 4) for v in views
    )
    return kv_lens, qo_offsets, kv_offsets


def _head_step(scales: ArrayView | None) -> int:
    """From a KV head's scale to the next one's."""
    return 0 if scales is None or scales.shape == (1,) else 1
