"""The geometry of a batch: what plan() is told besides lengths, checked and derived once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..array import Device
from ..core import dtypes, parse
from ..core.device import NO_GPU
from ..core.parse import BOOLS, zeros_and_ones
from ..core.problem import OutputGate
from ..core.spec import AttentionSpec
from ..errors import PlanError, UnsupportedError
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.key_lists import ListLauncher
from .spec import RawOptions, make_spec

_MAX_GEOMETRIES = 4096
_UNKNOWN: tuple[None, list[int]] = None, []
_BACKENDS = (
    *("auto", "fa2", "fa3", "cudnn", "cutlass", "cute-dsl", "trtllm-gen", "trtllm-native", "xqa"),
)


class PlanOptions(NamedTuple):
    """What a plan fixes besides lengths, as given: the key of the cache of geometries.

    mask_form: None without a mask; "runs" for intervals of keys (mask.py), and "ranges" for
            those that do without causality
    """

    device: Device
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None
    page_size: int  # 0: ragged keys
    q_data_type: object
    kv_data_type: object
    mask_form: str | None
    raw_options: RawOptions

    def changed(self, **changes: Any) -> PlanOptions:
        """With those changed that are not None, here or in raw_options."""
        new = {name: x for name, x in changes.items() if x is not None}
        own = {name: new.pop(name) for name in self._fields if name in new}
        return self._replace(**own, raw_options=self.raw_options._replace(**new))


class Variant(NamedTuple):
    """What a run decides about the kernel; see AttentionProblem. A run may bring a mask, scales of
    keys, gates of the output, or scales of requests or of blocks of them, which then know their
    place in the batch; and `skip_softmax`, see AttentionSpec."""

    aligned: bool
    prescale_logits: bool
    has_mask: bool = False
    key_scales: str = ""
    output_gate: OutputGate | None = None
    scales_requests: bool = False
    block_scales: bool = False
    skip_softmax: float = 0.0

    @property
    def needs_places(self) -> bool:
        """Whether work lists say more than the device's planners write."""
        return self.has_mask or self.scales_requests


@dataclass(slots=True, eq=False)
class Geometry:
    """What plans with the same options share.

    kv_axis  the axis of a cache along which its size may change: pages, or rows of ragged keys
    default_variant  for arrays on 16-byte boundaries without scales by head
    """

    options: PlanOptions
    spec: AttentionSpec
    kv_axis: int
    launchers: dict[Variant, BatchLauncher] = field(default_factory=dict)
    list_launchers: dict[tuple[Variant, bool, float], ListLauncher] = field(default_factory=dict)
    default_variant: Variant = field(init=False)

    def __post_init__(self) -> None:
        self.default_variant = Variant(True, self.spec.sm_scale <= 0.0)

    @property
    def launched_spec(self) -> AttentionSpec:
        """The spec that launches are planned by: on the CPU, with dtypes that a GPU takes."""
        return self.spec if self.options.device.kind != "cpu" else self.spec.as_on_gpu()

    def launcher(self, variant: Variant) -> BatchLauncher:
        launcher = self.launchers.get(variant)
        if launcher is None:
            aligned, prescale_logits, has_mask, key_scales, output_gate, *_ = variant
            spec, index = self.launched_spec, self.options.device.index
            if self.options.device.kind == "cpu":
                index = NO_GPU.index
            if has_mask:
                spec = spec.with_row_mask()
            if variant.skip_softmax:
                spec = replace(spec, skip_softmax=variant.skip_softmax)
            problem = spec.problem(aligned=aligned, prescale_logits=prescale_logits)
            problem = replace(problem, key_scales=key_scales, output_gate=output_gate)
            problem = replace(problem, block_scales=variant.block_scales)
            launcher = BatchLauncher(spec, problem, index)
            self.launchers[variant] = launcher
        return launcher

    def list_launcher(
        self, variant: Variant, are_of_query_heads: bool, output_scale: float
    ) -> ListLauncher:
        """What launches attention by lists, of query heads or of fewer groups."""
        key = variant, are_of_query_heads, output_scale
        launcher = self.list_launchers.get(key)
        if launcher is None:
            spec = replace(self.spec, output_scale=output_scale)
            problem = spec.problem(aligned=variant.aligned, prescale_logits=variant.prescale_logits)
            problem = replace(problem, output_gate=variant.output_gate)
            index = self.options.device.index
            launcher = ListLauncher(spec, index, are_of_query_heads, problem)
            self.list_launchers[key] = launcher
        return launcher


# By the options, one after another, with the places of those to which a bool would be equal.
_geometries: dict[tuple[object, ...], tuple[Geometry, list[int]]] = {}


def forget() -> None:
    """Let launchers be made anew, which plan by the card that is used then."""
    _geometries.clear()


def find_geometry(options: PlanOptions) -> Geometry:
    """The geometry of these options, checked when they are first seen."""
    geometry = find_known(options)
    if geometry is None:
        geometry = _make(options)
        if options.raw_options.is_constant:
            if len(_geometries) >= _MAX_GEOMETRIES:
                _geometries.clear()
            key = *options, *options.raw_options
            _geometries[key] = geometry, zeros_and_ones(key)
    return geometry


def find_known(options: PlanOptions) -> Geometry | None:
    """The geometry of these options if they have been seen."""
    key = *options, *options.raw_options
    try:
        geometry, zeros_or_ones = _geometries.get(key, _UNKNOWN)
    except TypeError:  # an option without a hash
        return None
    for index in zeros_or_ones:
        if type(key[index]) in BOOLS:
            return None
    return geometry


def _make(options: PlanOptions) -> Geometry:
    parse.kv_layout(options.raw_options.kv_layout)
    heads = count(options.num_qo_heads, "num_qo_heads")
    kv_heads = count(options.num_kv_heads, "num_kv_heads")
    dim_qk = count(options.head_dim_qk, "head_dim_qk")
    dim_vo = dim_qk if options.head_dim_vo is None else count(options.head_dim_vo, "head_dim_vo")
    q, kv = options.q_data_type, options.kv_data_type
    dtype_q = dtypes.float16 if q is None else dtypes.parse(q, "q_data_type")
    spec = make_spec(
        options.raw_options,
        (heads, kv_heads, dim_qk, dim_vo),
        dtype_q,
        dtype_q.of_values if kv is None else dtypes.parse(kv, "kv_data_type"),
        page_size=options.page_size,
        mask_form=options.mask_form,
    )
    spec.problem().check_supported(on_cpu=options.device.kind == "cpu")
    kv_axis = 1 if not spec.page_size and spec.kv_layout == "HND" else 0
    return Geometry(options, spec, kv_axis)


def count(value: Any, name: str) -> int:
    """A positive integer."""
    return value if type(value) is int and 0 < value < 1 << 31 else parse.require_int(value, name)


def split_size(fixed_split_size: Any, disable_split_kv: Any, unit: int) -> tuple[int, bool]:
    """(keys of a split or 0, whether keys may be split); a fixed size counts units of keys.

    disable_split_kv wins over a fixed size.
    """
    if fixed_split_size is None and disable_split_kv is False:
        return 0, True
    may_split = not parse.flag(disable_split_kv, "disable_split_kv")
    pages = -1
    if fixed_split_size is not None:
        pages = parse.require_int(fixed_split_size, "fixed_split_size", -1)
    if pages == -1:
        return 0, may_split
    keys = count(pages, "fixed_split_size") * unit
    return (keys, True) if may_split else (0, False)


# FlashInfer's variants come as source. Two of them ask for what an expression cannot say alone.
REFUSED_SOURCE = (
    "CUDA source of the caller's own is not taken; write its LogitsTransform and LogitsMask as "
    "logits_transform and mask_fn of plan() (a variant without a softmax: docs/logits.md)"
)


def backend(value: object, jit_args: object) -> None:
    """Check arguments that choose among FlashInfer's kernels, and nothing here."""
    parse.choice(value, _BACKENDS, "backend")
    if jit_args is not None:
        raise UnsupportedError(f"jit_args: {REFUSED_SOURCE}; pass None")


def refuse(what: str, **arguments: Any) -> None:
    """UnsupportedError naming the first of `arguments` that is given."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}: {what}; pass None")


# Fields whose arguments have other names.
_PUBLIC_NAMES = {
    "mask_form": "custom_mask",
    "key_share": "cp_world_size, cp_rank, cp_kv_cache_interleave_size",
}


def require_frozen(before: PlanOptions, now: PlanOptions) -> None:
    """PlanError naming what differs between the plans of a wrapper in graph mode."""
    names = (*PlanOptions._fields[:-1], *RawOptions._fields)
    for name, old, new in zip(
        names, (*before[:-1], *before.raw_options), (*now[:-1], *now.raw_options), strict=True
    ):
        if old != new:
            name = _PUBLIC_NAMES.get(name, name)
            raise PlanError(
                f"{name}: the first plan of this wrapper said {old!r} and this one says {new!r}, "
                "but a captured graph keeps it; use a separate wrapper for each"
            )
