"""JAX: attention inside jax.jit, lax.scan and shard_map, where arrays are tracers.

XLA calls back into this process with its own buffers, on its own stream: nothing is copied to the
host, and nothing is compiled but our kernels. Outside of jit the functions of `cupyattn` take JAX
arrays as they are.

Examples: :doc:`/docs/integrations/jax`.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from .. import cascade, decode, dot_product, flash_attn, mla, page, prefill, sparse, trtllm
from ..array import CPU, ArrayView, Device, as_cupy, as_numpy
from ..core import dtypes, env
from ..core.cupy_module import as_stream, cupy_module
from ..core.packages import needs
from ..core.recording import Recording, spoil
from ..core.tracing import JAX_CALLS
from ..engine.workspace import on_device
from ..errors import ArgumentError, UnsupportedError
from ..launch.driver.enqueue import cuda, enqueue_again
from ..launch.driver.params import this_thread
from .calls import CALLS, FLAGS, IGNORED, OUTPUTS, Call, is_default, joined, leaves
from .xla_exit import settle_at_exit
from .xla_ffi import Buffer, Frame, handler
from .xla_graphs import recorded
from .xla_launches import Launches

__all__ = [
    "append_paged_kv_cache",
    "attend",
    "attention_fn",
    "dot_product_attention",
    "exchange_states",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_state",
    "merge_states",
    "select",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
]

_TARGET, _RECORDED_TARGET = "cupyattn_call", "cupyattn_recorded_call"
# Of JAX: XLA runs a program's calls once before it records them, as they must have been.
_RECORDS_SINCE = 0, 11
_IN_JIT = {call.name: call for call in CALLS if call.is_operator and call.owner is None}
_F = TypeVar("_F", bound=Callable[..., Any])


@needs("jax")
def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    is_causal: bool = False,
) -> Any:
    """What flax's attention layers take as attention_fn, linen's and nnx's.

    Parameters
    ----------
    query
        [batch..., tokens, num_heads, head_dim].
    key, value
        [batch..., keys, num_heads, head_dim]; fewer heads than query's are shared.
    bias, mask
        Broadcastable to [batch..., num_heads, tokens, keys]. A mask may be of numbers, as flax's
        are: 0 where a row does not see a key.
    dtype
        Of the computation: arrays are cast to it. Default: their common one.
    is_causal
        The first query is at the first key, as in flax.
    dropout_rate
        Must be 0 where deterministic is False.
    deterministic
        True: there is no dropout.
    module
        Must be None (sow_weights).
    broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax
        Accepted, and change nothing: softmax is computed in float32.

    Returns
    -------
    array
        [batch..., tokens, num_heads, head_dim]. A row that sees no key gives 0.

    Raises
    ------
    CupyAttnError
        Errors as in dot_product_attention here.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> q, kv = jnp.ones((2, 8, 4, 64), "bfloat16"), jnp.ones((2, 8, 1, 64), "bfloat16")
    >>> attention_fn(q, kv, kv, is_causal=True).shape
    (2, 8, 4, 64)
    """
    import jax

    if dropout_rate and not deterministic:
        raise UnsupportedError(
            f"dropout_rate: got {dropout_rate} with deterministic=False; pass deterministic=True"
        )
    if module is not None:
        raise UnsupportedError("module: weights of attention are not made; pass sow_weights=False")
    common = jax.numpy.result_type(query, key, value) if dtype is None else dtype
    parts = [x.astype(common) for x in (query, key, value)]
    lead = parts[0].shape[:-3]
    batched = [x.reshape(-1, *x.shape[-3:]) for x in parts]
    if bias is not None:
        bias = _over_logits(bias, lead)
    if mask is not None:
        mask = _over_logits(mask if str(mask.dtype) == "bool" else mask != 0, lead)
    q, k, v = batched
    out = dot_product_attention(
        q, k, v, bias, mask, is_causal=bool(is_causal), causal_alignment="first"
    )
    return out.reshape(*lead, *out.shape[1:])


def _over_logits(x: Any, lead: tuple[int, ...]) -> Any:
    """[batch or 1, num_heads or 1, tokens or 1, keys or 1] of an array that broadcasts to
    [*lead, num_heads, tokens, keys]."""
    import jax

    wanted = len(lead) + 3
    x = x.reshape((1,) * (wanted - x.ndim) + x.shape)
    if any(extent != 1 for extent in x.shape[:-3]):
        x = jax.numpy.broadcast_to(x, (*lead, *x.shape[-3:]))
    return x.reshape(-1, *x.shape[-3:])


@needs("jax")
def exchange_states(
    o: Any, lse: Any, axis_name: str, *, lse_base_on_e: bool = False, out_dtype: Any = None
) -> tuple[Any, Any]:
    """In shard_map: from all heads over a device's keys to its own heads over the keys of all.

    Each device along `axis_name` attends with all query heads to the keys that it has. Its answers
    and LSE go to the devices whose heads they are, by one all-to-all, and merge there in the order
    of devices. Device r has heads r * H / size to (r + 1) * H / size - 1.

    Parameters
    ----------
    o
        float32 [n, H, D]; H is a multiple of the devices along the axis. float16 and bfloat16 are
        exchanged as float32.
    lse
        float32 [n, H]; -inf where a row has no key.
    axis_name
        The axis of the mesh that the devices share.
    lse_base_on_e
        The LSE is a natural logarithm, else of base 2.
    out_dtype
        Of the first output, default o's.

    Returns
    -------
    tuple of arrays
        (out [n, H / size, D], lse float32 [n, H / size]). ArgumentError: shapes that do not fit
        each other, or heads that the devices do not divide.

    Examples
    --------
    >>> from functools import partial
    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(jax.devices()[:1], ("keys",))
    >>> exchange = partial(exchange_states, axis_name="keys")
    >>> heads = P(None, "keys")
    >>> merged = jax.shard_map(exchange, mesh=mesh, in_specs=(P(), P()), out_specs=(heads, heads))
    >>> out, lse = merged(jnp.ones((4, 8, 64)), jnp.zeros((4, 8)))
    >>> out.shape, lse.shape
    ((4, 8, 64), (4, 8))
    """
    import jax

    size = jax.lax.psum(1, axis_name)
    if o.ndim != 3 or lse.shape != o.shape[:2]:
        raise ArgumentError(
            f"o, lse: shapes are {list(o.shape)} and {list(lse.shape)}; wanted [n, H, D] and [n, H]"
        )
    rows, heads, _ = o.shape
    if heads % size:
        raise ArgumentError(
            f"o: {heads} heads for {size} devices along {axis_name!r}; wanted a multiple of {size}"
        )
    # One collective brings both: the LSE lies behind the columns of its state.
    state = jax.numpy.concatenate((o.astype("float32"), lse.astype("float32")[..., None]), -1)
    parts = state.reshape(rows, size, heads // size, -1)
    taken = jax.lax.all_to_all(parts, axis_name, split_axis=1, concat_axis=1)
    out, merged = merge_states(taken[..., :-1], taken[..., -1], lse_base_on_e=lse_base_on_e)
    return out.astype(o.dtype if out_dtype is None else out_dtype), merged


# --- the call site, while JAX traces ---


@needs("jax")
def _call(
    name: str,
    arrays: dict[str, Any],
    constants: dict[str, Any],
    outputs: list[tuple[Any, Any]],
    aliases: dict[int, int] | None = None,
) -> Any:
    """The outputs of a call, by XLA. aliases: arrays, by their number, that outputs begin as."""
    import jax

    _register()
    _refuse_float32(arrays)
    for constant, x in constants.items():
        if isinstance(x, jax.core.Tracer):
            raise ArgumentError(
                f"{constant}: is traced, but is a constant of the compiled function; pass a number,"
                " or name its argument in jax.jit's static_argnames"
            )
    # What the handler is to do goes along as text, which also compilation caches can keep.
    shapes = _shapes(arrays, outputs)
    text = json.dumps([name, [*arrays], constants, shapes], default=_plain)
    is_recorded = jax.__version_info__ >= _RECORDS_SINCE and env.XLA_GRAPHS.flag()
    # XLA refuses graphs in which nothing is launched.
    is_recorded &= shapes is not None and not any(0 in shape for shape, _ in shapes)
    call = jax.ffi.ffi_call(
        _RECORDED_TARGET if is_recorded else _TARGET,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
        vmap_method="sequential",
        input_output_aliases=aliases or {},
    )

    @jax.custom_jvp
    def without_gradient(*values: Any) -> Any:
        return call(*values, call=text)

    without_gradient.defjvp(functools.partial(_refuse_gradient, name))
    return without_gradient(*arrays.values())


def _shapes(arrays: dict[str, Any], outputs: list[tuple[Any, Any]]) -> list[Any] | None:
    """Shapes and dtypes of all arrays, which the calls of a call site have in common; None if they
    have not (jax.export's symbolic ones)."""
    specs = [(x.shape, x.dtype) for x in arrays.values()] + outputs
    if not all(isinstance(extent, int) for shape, _ in specs for extent in shape):
        return None
    return [[list(shape), str(dtype)] for shape, dtype in specs]


def _refuse_float32(arrays: dict[str, Any]) -> None:
    """UnsupportedError for queries that no kernel has, as far as JAX says where they will be."""
    import jax

    name, query = next(iter(arrays.items()))
    if str(query.dtype) != "float32" or name not in ("q", "query"):
        return
    if jax.default_backend() != "gpu" or _is_for_cpu(arrays.values()):
        return
    raise UnsupportedError(
        f"{name}: float32 has no kernel on a GPU; cast query, keys and values to bfloat16 or "
        "float16, or set jax_default_device to a CPU"
    )


def _is_for_cpu(arrays: Iterable[Any]) -> bool:
    """Whether JAX is told to compute on the CPU, or an array is there."""
    import jax

    device = jax.config.jax_default_device
    if device is not None:
        return getattr(device, "platform", device) == "cpu"
    concrete = (x for x in arrays if not isinstance(x, jax.core.Tracer) and hasattr(x, "devices"))
    return any(device.platform == "cpu" for x in concrete for device in x.devices())


def _plain(x: Any) -> Any:
    """A number that json does not know, NumPy's say."""
    if hasattr(x, "item"):
        return x.item()
    raise ArgumentError(f"got {type(x).__name__} for a constant; wanted a number")


def _refuse_gradient(name: str, primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(
        f"{name}: cupyattn has no gradient; call it outside of jax.grad, or behind "
        "jax.lax.stop_gradient"
    )


_TEXT = """`cupyattn.{path}` of JAX arrays or tracers.

    Arrays may be traced, also those in logits_params; everything else is a constant of the compiled
    function: numbers, flags, expressions. out, lse and workspaces must be None: JAX arrays cannot
    be written, and workspaces are memory of the call.

    Returns
    -------
    result
        As that function returns{returns}. Under vmap requests are computed one after another.

    Raises
    ------
    UnsupportedError
        By grad and jvp, for there is no gradient; while JAX traces also for masks of
        dot_product_attention that are no bools, and for float32 queries on a GPU. Arguments that
        do not fit each other raise when the compiled function runs, with cupyattn's sentence in
        JAX's error.
    """
_WRITTEN = """, but the cache with the tokens in it, in the form that it was given in: one
        array, or (K, V). In a function that the cache is donated to (jax.jit's donate_argnums) it
        is written in place; otherwise XLA copies it first"""


def _function(function: _F) -> _F:
    """A public call as a function of JAX's tracers."""
    call = _IN_JIT[function.__name__]
    signature = inspect.signature(function)
    written = call.writes[0] if call.writes and not call.appends else ""

    def traced(*args: Any, **kwargs: Any) -> Any:
        # A signature need not show all synonyms.
        shown = {n if n in signature.parameters else call.own_name(n): x for n, x in kwargs.items()}
        arguments = {**call.defaults, **signature.bind(*args, **shown).arguments}
        if arguments.get("out_dtype") is not None:
            arguments["out_dtype"] = dtypes.parse(arguments["out_dtype"], "out_dtype").name
        arrays, constants = _arguments(call, arguments)
        if written:
            return _written(call, arrays, constants, written)
        outputs = [(x.shape, x.dtype) for _, x in leaves("", call.outputs(arguments))][:2]
        results = _call(call.name, arrays, constants, outputs)
        if arguments.get("return_residual"):
            return results[0], results[1].astype(outputs[0][1])
        return results[0] if len(results) == 1 else tuple(results)

    path = call.path.replace(":", ".")
    traced.__doc__ = _TEXT.format(path=path, returns=_WRITTEN if written else "")
    traced.__name__ = traced.__qualname__ = call.name
    vars(traced)["__signature__"] = signature
    return cast(_F, traced)


def _written(call: Call, arrays: dict[str, Any], constants: dict[str, Any], argument: str) -> Any:
    """An argument as the call leaves it behind."""
    own = [at for at in arrays if at.partition(".")[0] == argument]
    outputs = [(arrays[at].shape, arrays[at].dtype) for at in own]
    aliases = {[*arrays].index(at): index for index, at in enumerate(own)}
    results = _call(call.name, arrays, constants, outputs, aliases)
    return results[0] if own == [argument] else tuple(results)


def _arguments(call: Call, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a call, by calls.leaves, and its constants but those that change nothing."""
    arrays: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, x in arguments.items():
        if name in IGNORED or name in FLAGS or x is None:
            continue
        if name in (*OUTPUTS, "workspace_buffer"):
            raise UnsupportedError(f"{name}: JAX arrays cannot be written; pass None")
        kind = call.kinds.get(call.own_name(name), "")
        if name == call.appends:
            raise UnsupportedError(
                f"{name}: JAX arrays cannot be written; append by append_paged_kv_cache first"
            )
        if kind.startswith("Tensor"):
            arrays.update(leaves(name, x))
        elif name == "logits_params":
            for at, leaf in leaves(name, x):
                (arrays if hasattr(leaf, "dtype") else constants)[at] = leaf
        elif not is_default(x, call.defaults[name]):
            if not kind and name not in ("logits_transform", "mask_fn", "out_dtype"):
                raise UnsupportedError(
                    f"{name}: {call.name} does not take it inside jax.jit; leave it out, or make "
                    "the call outside"
                )
            constants[name] = x
    mask = arrays.get("mask")
    if mask is not None and call.name == "dot_product_attention" and str(mask.dtype) != "bool":
        raise ArgumentError(
            f"mask: dtype is {mask.dtype}; wanted bool, True where a row sees a key; pass what is "
            "added to logits as bias"
        )
    return arrays, constants


append_paged_kv_cache = _function(page.append_paged_kv_cache)
attend = _function(sparse.attend)
dot_product_attention = _function(dot_product.dot_product_attention)
flash_attn_func = _function(flash_attn.flash_attn_func)
flash_attn_varlen_func = _function(flash_attn.flash_attn_varlen_func)
flash_attn_with_kvcache = _function(flash_attn.flash_attn_with_kvcache)
merge_state = _function(cascade.merge_state)
merge_states = _function(cascade.merge_states)
select = _function(sparse.select)
single_decode_with_kv_cache = _function(decode.single_decode_with_kv_cache)
single_prefill_with_kv_cache = _function(prefill.single_prefill_with_kv_cache)
trtllm_batch_context_with_kv_cache = _function(trtllm.trtllm_batch_context_with_kv_cache)
trtllm_batch_decode_with_kv_cache = _function(trtllm.trtllm_batch_decode_with_kv_cache)
trtllm_batch_decode_with_kv_cache_mla = _function(mla.trtllm_batch_decode_with_kv_cache_mla)


@functools.cache
def _register() -> tuple[Any, ...]:
    """Make the handlers known to XLA; returns them, to be kept."""
    import jax

    if not hasattr(jax, "ffi"):
        import jax.ffi
    import ctypes

    kept = []
    for target in (_TARGET, _RECORDED_TARGET):
        is_recorded = target == _RECORDED_TARGET
        on_gpu = _on_gpu_or_recorded if is_recorded else _on_gpu
        for platform, function in (("cpu", _on_cpu), ("CUDA", on_gpu)):
            c_function = handler(function, may_be_recorded=is_recorded and platform == "CUDA")
            pointer = ctypes.cast(c_function, ctypes.c_void_p).value
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(pointer), platform=platform)
            kept.append(c_function)
    _settle_at_exit()
    return tuple(kept)


@functools.cache
def _settle_at_exit() -> None:
    settle_at_exit(frozenset(x.__code__ for x in (_on_cpu, _on_gpu, _on_gpu_or_recorded)))


# --- the call itself, when XLA runs it ---


def _on_cpu(frame: Frame) -> None:
    _bound(frame, _as_numpy)()


def _on_gpu_or_recorded(frame: Frame) -> None:
    stream = frame.stream()
    if cuda().is_capturing(stream):
        _record(frame, stream)
    else:
        _on_gpu(frame)


def _record(frame: Frame, stream: int) -> None:
    """Put what the call launches into the graph that the stream is recording. XLA has run the call
    before, so that kernels are loaded and what calls keep is made."""
    outputs = frame.outputs()
    index = _owner((*frame.inputs(), *outputs))
    with on_device(index), as_stream(stream), recorded(stream, index, outputs[0].ptr):
        _bound(frame, lambda x: _as_cupy(x, index))()


def _on_gpu(frame: Frame) -> None:
    key, addresses = (frame.stream(), frame.kind()), frame.addresses()
    site = _sites.get(key)
    if site is None:
        if len(_sites) >= _MAX_SITES:
            _sites.clear()
        site = _sites[key] = _Site(frame, key[0])
    with site.lock:
        if not site.launches.again(addresses, site.index, key[0]):
            site.run(frame, addresses)


class _Site:
    """A call site on one stream: the same call each time, though XLA may move its buffers.

    The first run checks its arguments. The next ones find the call in the call cache, and what they
    launch is recorded, until that is known on any memory; later ones do no more than launch it.
    Calls that do more than launch, or whose launches follow from more than addresses, are kept by
    their addresses.

    lock    held while a call is launched. Launches of one call hand on what they know in scratch
            memory that calls of other threads on the stream have too: theirs must not come between.
    """

    __slots__ = ("_calls", "_has_run", "_kept", "index", "launches", "lock", "stream")

    def __init__(self, frame: Frame, stream: int) -> None:
        self.index, self.stream = _owner((*frame.inputs(), *frame.outputs())), stream
        self.launches = Launches()
        self.lock = _locks.setdefault((self.index, stream), threading.RLock())
        self._has_run = False
        self._calls: dict[tuple[int, ...], Callable[[], None]] = {}
        self._kept: dict[tuple[int, ...], Recording] = {}

    def run(self, frame: Frame, addresses: tuple[int, ...]) -> None:
        kept = self._kept.get(addresses)
        if kept is not None:
            enqueue_again(kept, self.index, self.stream)
            return
        with on_device(self.index), as_stream(self.stream):
            call = self._calls.get(addresses)
            if call is None:
                call = _bound(frame, lambda x: _as_cupy(x, self.index))
            if not self._has_run:
                call()
                self._has_run = True
                return
            with Recording() as recording:
                this_thread.launch_buffer.clear()
                call()
        if not recording.is_whole:
            _keep(self._calls, addresses, call)
            return
        self.launches.learn(addresses, recording)
        if self.launches.is_hopeless:
            _keep(self._kept, addresses, recording)


_MAX_SITES = 4096
_MAX_KEPT = 512  # memories of a site
_sites: dict[tuple[int, Any], _Site] = {}
_locks: dict[tuple[int, int], threading.RLock] = {}  # of a device's streams
_T = TypeVar("_T")


def _keep(kept: dict[tuple[int, ...], _T], addresses: tuple[int, ...], x: _T) -> None:
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[addresses] = x


def _owner(buffers: Sequence[Buffer]) -> int:
    """The device that the memory of a call is on."""
    runtime = cupy_module().cuda.runtime
    owned = next((x.ptr for x in buffers if x.ptr), 0)
    return int(runtime.pointerGetAttributes(owned).device) if owned else 0


def _as_numpy(buffer: Buffer) -> Any:
    return as_numpy(_view(buffer, CPU))


def _as_cupy(buffer: Buffer, index: int) -> Any:
    return as_cupy(_view(buffer, Device("cuda", index)))


def _view(buffer: Buffer, device: Device) -> ArrayView:
    strides, step = [], 1
    for extent in reversed(buffer.shape):
        strides.append(step)
        step *= extent
    dtype = dtypes.BY_NAME[buffer.dtype]
    return ArrayView(
        buffer.ptr, buffer.shape, tuple(reversed(strides)), dtype, device, "dlpack", False, None
    )


def _bound(frame: Frame, as_array: Callable[[Buffer], Any]) -> Callable[[], None]:
    """The call of a frame on its buffers, as arrays."""
    inputs, outputs = ([as_array(x) for x in xs] for xs in (frame.inputs(), frame.outputs()))
    return _prepare(frame.text(), inputs, outputs)


def _prepare(text: bytes, inputs: list[Any], outputs: list[Any]) -> Callable[[], None]:
    """The call that a call site names, from its inputs to its outputs."""
    name, names, constants = _parse(text)
    call, arrays = _IN_JIT[name], dict(zip(names, inputs, strict=True))
    if name == "dot_product_attention" and len(outputs) == 1 and _is_one_request(arrays, constants):
        return _one_request(arrays, constants, outputs[0])
    named = joined([*arrays.items(), *constants.items()])
    if call.writes and not call.appends:  # XLA has filled the outputs with what is in the arrays
        is_pair = isinstance(named[call.writes[0]], tuple)
        named[call.writes[0]] = tuple(outputs) if is_pair else outputs[0]
        return functools.partial(call.function, **named)
    if "workspace_buffer" in call.parameters:
        named["workspace_buffer"] = None
    return functools.partial(_call_into, call, named, outputs)


@functools.lru_cache(maxsize=4096)
def _parse(text: bytes) -> tuple[str, list[str], dict[str, Any]]:
    name, names, constants, _ = json.loads(text)
    return name, names, constants


def _call_into(call: Call, named: dict[str, Any], outputs: list[Any]) -> None:
    """Call for the output, and for the LSE if there is an array for it."""
    out, *more = outputs
    flag = {call.flag: bool(more)} if call.flag else {}
    if more and "lse" in call.parameters:
        call.function(**named, **flag, out=out, lse=more[0])
        return
    if more:
        spoil()
    result = call.function(**named, **flag, out=out)
    if more:
        more[0][...] = result[1]


def _is_one_request(arrays: dict[str, Any], constants: dict[str, Any]) -> bool:
    """Whether this is attention of one dense request, whose rows are aligned as in a request."""
    is_dense = all(len(x.shape) == 4 and x.shape[0] == 1 for x in arrays.values())
    own = "scale", "is_causal", "local_window_size", "logits_soft_cap"
    return is_dense and len(arrays) == 3 and all(name in own for name in constants)


def _one_request(arrays: dict[str, Any], constants: dict[str, Any], out: Any) -> Callable[[], None]:
    """Its arrays are cut here, once, and not at each call."""
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    options = {
        "softmax_scale": constants.get("scale"),
        "causal": bool(constants.get("is_causal", False)),
        "window_size": dot_product._window(constants.get("local_window_size")),
        "softcap": constants.get("logits_soft_cap") or 0.0,
        "out": out,
        "return_softmax_lse": False,
    }
    function, parts, named = dot_product.single_call(q, k, v, q.shape[1], options)

    def attend() -> None:
        try:
            function(*parts, **named)
        except (ArgumentError, UnsupportedError) as error:
            raise dot_product.renamed(error) from error

    return attend


JAX_CALLS["dot_product_attention"] = dot_product_attention

if "jax" in sys.modules:  # else at the first call: what JAX does at exit comes behind
    _settle_at_exit()
