"""KV pools: the memory of keys and values of all layers, in slots of one token.

A backend asks a pool for pages of a layer and hands it new keys and values. Any object with the
methods of `KVPool` is one.
"""

from __future__ import annotations

from typing import Any, Protocol

from .. import array
from ..array import ArrayView
from ..core import dtypes, parse
from ..core.dtypes import DType
from ..core.parse import require_int
from ..errors import ArgumentError, UnsupportedError
from ..slots import reshape_and_cache

_DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)  # float32: of CPU arrays


class KVPool(Protocol):
    """What a backend needs of a pool."""

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """K [slots, num_kv_heads, head_dim] and V [slots, num_kv_heads, v_head_dim] of a layer."""

    def set_kv_buffer(
        self, layer: Any, loc: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        """Write k and v [n, num_kv_heads, head_dim] to slots `loc` [n] of a layer."""


class MLAPool(Protocol):
    """What a backend needs of a pool of latent keys, whose values are the first columns.

    A pool whose rows are in two arrays has `get_latent_buffers(layer_id)` too: (latent rows, rope
    rows), [slots, 1, columns] each.
    """

    def get_key_buffer(self, layer_id: int) -> Any:
        """[slots, 1, kv_lora_rank + rope_dim] of a layer."""

    def set_mla_kv_buffer(self, layer: Any, loc: Any, k_nope: Any, k_rope: Any) -> None:
        """Write latents [n, 1, kv_lora_rank] and [n, 1, rope_dim] to slots `loc` [n]."""


class MHATokenToKVPool:
    """Keys and values of multi-head attention, in arrays of its own.

    Parameters
    ----------
    num_slots
        Tokens; a multiple of page_size.
    head_num, head_dim, v_head_dim
        Heads and columns of keys; columns of values, by default as many.
    layer_num, start_layer
        Layers, and the number of the first.
    like
        An array: memory is of its framework, on its device.
    dtype
        Name of a dtype of keys: float16, bfloat16, float32 (CPU arrays) or an fp8 one.
    full_to_swa
        For a pool that is the second one of a hybrid: the slot here for each slot of the first;
        what is written names slots of the first.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import serving
    >>> req_to_token = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
    >>> pool = serving.MHATokenToKVPool(4 * 64, 2, 64, 1, req_to_token, dtype="float16")
    >>> keys, values = pool.get_kv_buffer(0)
    >>> keys.shape
    (256, 2, 64)
    """

    def __init__(
        self,
        num_slots: int,
        head_num: int,
        head_dim: int,
        layer_num: int,
        like: Any,
        *,
        dtype: Any = "bfloat16",
        v_head_dim: int | None = None,
        start_layer: int = 0,
        full_to_swa: Any = None,
    ) -> None:
        v = array.view(like, "like")
        element = _parse_dtype(dtype)
        counts = {"num_slots": num_slots, "head_num": head_num, "head_dim": head_dim}
        counts |= {"layer_num": layer_num, "v_head_dim": v_head_dim or head_dim}
        slots, heads, dim_k, layers, dim_v = (require_int(x, n) for n, x in counts.items())
        self.start_layer = start_layer
        self.full_to_swa = full_to_swa
        self._buffers = [
            tuple(array.empty((slots, heads, dim), element, v) for dim in (dim_k, dim_v))
            for _ in range(layers)
        ]

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """K [num_slots, head_num, head_dim] and V [num_slots, head_num, v_head_dim] of a layer.

        Raises
        ------
        CupyAttnError
            ArgumentError for a layer that the pool does not have.
        """
        k, v = self._buffers[layer_index(layer_id, self.start_layer, len(self._buffers))]
        return k, v

    def get_key_buffer(self, layer_id: int) -> Any:
        """K of `get_kv_buffer`."""
        return self.get_kv_buffer(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> Any:
        """V of `get_kv_buffer`."""
        return self.get_kv_buffer(layer_id)[1]

    def set_kv_buffer(
        self, layer: Any, loc: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        """Write k [n, head_num, head_dim] and v [n, head_num, v_head_dim] to slots `loc` [n] of the
        layer `layer.layer_id`: one launch.

        They may also be [n, heads * columns]. In a pool of fp8 they are divided by k_scale and
        v_scale (None: 1), and rounded; other pools read no scales. Arrays and errors as in
        `slots.reshape_and_cache`.
        """
        buffers = self.get_kv_buffer(layer.layer_id)
        if len(k.shape) == 2:
            k = k.reshape(-1, *buffers[0].shape[1:])
        if len(v.shape) == 2:
            v = v.reshape(-1, *buffers[1].shape[1:])
        write_slots(buffers, loc, k, v, k_scale, v_scale, self.full_to_swa)

    def move(self, new: Any, old: Any) -> None:
        """Copy the keys and values of all layers from slots old [n] to slots new [n], as accepted
        drafts move up. All are read before any is written; a negative new slot skips."""
        for buffers in self._buffers:
            move_slots(buffers, new, old, self.full_to_swa)

    def set_mla_kv_buffer(self, layer: Any, loc: Any, k_nope: Any, k_rope: Any) -> None:
        """Raises
        ------
        CupyAttnError
            UnsupportedError: latent keys have a pool of their own.
        """
        raise UnsupportedError("set_mla_kv_buffer: this pool is of MHA; make an MLATokenToKVPool")


class MLATokenToKVPool:
    """Latent keys of multi-head latent attention, whose first columns are values too.

    Parameters
    ----------
    num_slots
        Tokens; a multiple of page_size.
    kv_lora_rank
        Latent columns.
    qk_rope_head_dim
        Rope columns.
    layer_num, start_layer
        Layers, and the number of the first.
    like
        An array: memory is of its framework, on its device.
    dtype
        Name of a dtype, float8_e4m3fn too: then a layer's k_scale, 1 by default, is what rows are
        divided by.
    is_split
        The two parts in arrays of their own, else in one row.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import serving
    >>> like = np.zeros(1, np.float16)
    >>> pool = serving.MLATokenToKVPool(256, 512, 64, 1, like, dtype="float16")
    >>> pool.get_key_buffer(0).shape
    (256, 1, 576)
    """

    def __init__(
        self,
        num_slots: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        like: Any,
        *,
        dtype: Any = "bfloat16",
        start_layer: int = 0,
        is_split: bool = False,
    ) -> None:
        v = array.view(like, "like")
        element = _parse_dtype(dtype)
        counts = {"num_slots": num_slots, "kv_lora_rank": kv_lora_rank}
        counts |= {"qk_rope_head_dim": qk_rope_head_dim, "layer_num": layer_num}
        slots, latent, rope, layers = (require_int(x, n) for n, x in counts.items())
        self.start_layer, self.is_split = start_layer, parse.flag(is_split, "is_split")
        self.kv_lora_rank, self.qk_rope_head_dim = latent, rope
        self._parts: list[tuple[Any, Any]] = []
        self._rows: list[Any] = []
        for _ in range(layers):
            if self.is_split:
                first, second = (array.empty((slots, 1, n), element, v) for n in (latent, rope))
            else:
                row = array.empty((slots, 1, latent + rope), element, v)
                self._rows.append(row)
                first, second = row[..., :latent], row[..., latent:]
            self._parts.append((first, second))

    def get_latent_buffers(self, layer_id: int) -> tuple[Any, Any]:
        """(rows of both parts, None), or with is_split (latent rows, rope rows)."""
        index = self._index(layer_id)
        return self._parts[index] if self.is_split else (self._rows[index], None)

    def get_key_buffer(self, layer_id: int) -> Any:
        """Keys of a layer, [num_slots, 1, kv_lora_rank + qk_rope_head_dim].

        Raises
        ------
        CupyAttnError
            UnsupportedError where the two parts are in arrays of their own.
        """
        if self.is_split:
            raise UnsupportedError(
                "get_key_buffer: the pool has the parts of a row in two arrays; call "
                "get_latent_buffers"
            )
        return self._rows[self._index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> Any:
        """Values of a layer, [num_slots, 1, kv_lora_rank]: the latent columns of its keys."""
        return self._parts[self._index(layer_id)][0]

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """The two above."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self, layer: Any, loc: Any, k: Any, v: Any = None, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        """Write rows of both parts, [n, 1, columns] or [n, columns], to slots `loc` [n]. v and
        v_scale are not read: values are a part of their keys."""
        latent = self.kv_lora_rank
        self._write(layer, loc, k[..., :latent], k[..., latent:], k_scale)

    def set_mla_kv_buffer(self, layer: Any, loc: Any, k_nope: Any, k_rope: Any) -> None:
        """Write latent columns k_nope and rope columns k_rope, [n, 1, columns] or [n, columns]."""
        self._write(layer, loc, k_nope, k_rope, getattr(layer, "k_scale", None))

    def move(self, new: Any, old: Any) -> None:
        """Copy the rows of all layers from slots old [n] to slots new [n]. All are read before any
        is written; a negative new slot skips."""
        for parts in self._parts:
            move_slots(parts, new, old)

    def _write(self, layer: Any, loc: Any, k_nope: Any, k_rope: Any, scale: Any) -> None:
        if len(k_nope.shape) == 2:
            k_nope = k_nope[:, None]
        if len(k_rope.shape) == 2:
            k_rope = k_rope[:, None]
        parts = self._parts[self._index(layer.layer_id)]
        write_slots(parts, loc, k_nope, k_rope, scale, scale)

    def _index(self, layer_id: int) -> int:
        return layer_index(layer_id, self.start_layer, len(self._parts))


def layer_index(layer_id: int, first: int, count: int) -> int:
    """The index of a layer in a pool of `count` layers from `first` on."""
    index = layer_id - first
    if not 0 <= index < count:
        raise ArgumentError(
            f"layer_id: got {layer_id}; the pool has layers {first} to {first + count - 1}"
        )
    return index


def write_slots(
    buffers: tuple[Any, Any],
    loc: Any,
    k: Any,
    v: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    full_to_swa: Any = None,
) -> None:
    """Write k and v to slots of a layer's buffers. Scales of buffers that are not fp8 count not."""
    if k_scale is not None or v_scale is not None:
        dtype = array.view(buffers[0], "k_cache").dtype
        if not dtype.is_fp8 or array.view(k, "k").dtype.is_fp8:
            k_scale = v_scale = None
    k_buffer, v_buffer = buffers
    reshape_and_cache(
        k, v, k_buffer, v_buffer, loc, k_scale=k_scale, v_scale=v_scale, slot_map=full_to_swa
    )


def move_slots(buffers: tuple[Any, Any], new: Any, old: Any, full_to_swa: Any = None) -> None:
    """Copy rows of a layer's buffers from slots to slots."""
    if full_to_swa is not None:
        old = full_to_swa[old]
    k_buffer, v_buffer = buffers
    reshape_and_cache(k_buffer[old], v_buffer[old], k_buffer, v_buffer, new, slot_map=full_to_swa)


def _parse_dtype(dtype: Any) -> DType:
    """The dtype of a pool of keys; ArgumentError for one that no attention reads."""
    element = dtypes.parse(dtype, "dtype")
    if element.is_fp8 or element in _DTYPES:
        return element
    raise ArgumentError(
        f"dtype: got {element}; wanted a dtype of keys: "
        f"{', '.join(str(x) for x in _DTYPES)}, float8_e4m3fn or float8_e5m2"
    )


def require_kv_dtype(dtype: DType, wanted: str | None) -> None:
    """ArgumentError unless a pool is of the dtype that the backend was configured for."""
    if wanted is not None and dtype is not dtypes.parse(wanted, "kv_dtype"):
        raise ArgumentError(
            f"kv_dtype: the pool is of {dtype}, but the backend was configured for {wanted}; make "
            "them the same, or pass kv_dtype None"
        )


def view_pages(buffer: Any, name: str, page_size: int, shape: tuple[int, int]) -> Any:
    """A buffer [slots, heads, head_dim] as pages [slots / page_size, page_size, heads, head_dim].

    shape: (heads, head_dim). Slots past the last whole page belong to no page.
    """
    v = array.view(buffer, name)
    if len(v.shape) == 4:
        if v.shape[1] == 1 or v.strides[0] == v.shape[1] * v.strides[1]:
            v = _as_slots(v)
        else:
            raise ArgumentError(
                f"{name}: shape {list(v.shape)} with strides {list(v.strides)} is no row of slots; "
                "wanted [slots, heads, head_dim]"
            )
    if len(v.shape) != 3 or tuple(v.shape[1:]) != shape:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted [slots, {shape[0]}, {shape[1]}]"
        )
    count, step = v.shape[0] // page_size, v.strides[0]
    strides = page_size * step, step, *v.strides[1:]
    return array.restride(buffer, name, (count, page_size, *v.shape[1:]), strides)


def _as_slots(v: ArrayView) -> ArrayView:
    shape = v.shape[0] * v.shape[1], *v.shape[2:]
    return array.as_strided(
        v, shape, (v.strides[1] if v.shape[1] > 1 else v.strides[0], *v.strides[2:])
    )
