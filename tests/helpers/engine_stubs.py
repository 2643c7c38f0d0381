"""What engines import that a test machine may lack: norms and rotary embeddings of FlashInfer's
names, kernels that they compile when they start, sockets; and torch.cuda on a CPU."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest


def module(patch: pytest.MonkeyPatch, name: str, **values: Any) -> types.ModuleType:
    """Put a module with these values under a name."""
    made = types.ModuleType(name)
    vars(made).update(values)
    patch.setitem(sys.modules, name, made)
    return made


def absent(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Modules that do nothing, for those that are not installed."""
    for name in names:
        if name.partition(".")[0] not in sys.modules:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                continue
        made = mock.MagicMock(name=name)
        made.__path__ = []
        patch.setitem(sys.modules, name, made)


# --- FlashInfer's functions that are not attention ---


def rmsnorm(x: Any, weight: Any, eps: float, out: Any = None) -> Any:
    y = x.float()
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
    return y if out is None else out.copy_(y)


def fused_add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float) -> None:
    residual.add_(x)
    rmsnorm(residual, weight, eps, out=x)


def silu_and_mul(x: Any, out: Any = None) -> Any:
    import torch

    a, b = x.chunk(2, -1)
    y = torch.nn.functional.silu(a) * b
    return y if out is None else out.copy_(y)


def rotate(positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any) -> None:
    import torch

    cos, sin = cos_sin_cache[positions.long(), None].chunk(2, -1)
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)
        a, b = heads.float().chunk(2, -1)
        heads.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))


def flashinfer(patch: pytest.MonkeyPatch) -> None:
    module(
        *(patch, "flashinfer"),
        rmsnorm=rmsnorm,
        fused_add_rmsnorm=fused_add_rmsnorm,
        silu_and_mul=silu_and_mul,
        apply_rope_with_cos_sin_cache_inplace=rotate,
    )


# --- mini-sglang's own kernels ---


def indexing(weights: Any, indices: Any, **_: Any) -> Any:
    return weights[indices.long()]


def store_cache(k_cache: Any, v_cache: Any, indices: Any, k: Any, v: Any) -> None:
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[indices.long()] = x.view(-1, *cache.shape[1:])


def fast_compare_key(x: Any, y: Any) -> int:
    """How many elements two keys begin with that are equal."""
    size = min(len(x), len(y))
    differ = (x[:size] != y[:size]).nonzero()
    return int(differ[0]) if len(differ) else size


def minisgl_kernels(patch: pytest.MonkeyPatch) -> None:
    nothing = dict.fromkeys(
        ("fused_moe_kernel_triton", "moe_sum_reduce_triton", "init_pynccl", "PyNCCLCommunicator")
    )
    module(
        *(patch, "minisgl.kernel"),
        indexing=indexing,
        store_cache=store_cache,
        fast_compare_key=fast_compare_key,
        **nothing,
    )


# --- nano-vllm ---


class Hash:
    """xxhash's xxh64, as far as equal bytes are to have equal numbers."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=8)

    def update(self, data: bytes) -> None:
        self.hash.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self.hash.digest(), "little")


def store_kvcache(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """What a kernel of its own does on a GPU."""
    kept = slot_mapping >= 0
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[slot_mapping[kept].long()] = x[kept]


# --- torch.cuda on a CPU ---


class Graph:
    """A CUDA graph whose replays call a function."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.replay: Any = None

    def pool(self) -> int:
        return 0


class Stream:
    def __init__(self, **_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


@contextlib.contextmanager
def _capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    Graph.capturing = graph
    yield
    Graph.capturing = None


def torch_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let programs for a GPU run on the CPU: streams do nothing, no memory is pinned."""
    import torch._dynamo  # looks at what is replaced below when it is imported
    import torch.utils._device

    torch.utils._device._device_constructors()  # keeps the functions that are replaced below
    current = [Stream()]

    class OnStream(contextlib.ContextDecorator):
        """What torch.cuda.stream() gives, to be entered any number of times."""

        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.stream

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    nothing = lambda *_, **__: None  # noqa: E731
    event = mock.MagicMock()
    fakes = {
        "Stream": Stream,
        "Event": lambda *_, **__: event,
        "CUDAGraph": Graph,
        "graph": _capture,
        "set_stream": lambda stream: current.__setitem__(0, stream),
        "current_stream": lambda *_: current[0],
        "stream": OnStream,
        "mem_get_info": lambda *_: (1 << 30, 1 << 30),
        "memory_stats": lambda: mock.MagicMock(__getitem__=lambda *_: 0),
    }
    fakes |= dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), nothing
    )
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch.cuda.nvtx, "range", lambda *_: contextlib.nullcontext())
    patch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    patch.setattr(torch.Tensor, "cuda", lambda x, **_: x)
    patch.setattr(torch, "set_default_device", nothing)
    real_device = torch.device

    class Device(type(real_device)):  # type: ignore[misc]
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, real_device)

        def __call__(cls, name: Any, *args: Any) -> Any:
            return real_device("cpu" if str(name).startswith("cuda") else name)

    patch.setattr(torch, "device", Device("device", (), {}))
    for name in ("tensor", "empty"):
        real = getattr(torch, name)

        def make(*args: Any, real: Any = real, pin_memory: bool = False, **named: Any) -> Any:
            return real(*args, **named)

        patch.setattr(torch, name, make)
