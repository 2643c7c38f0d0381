"""cuDNN in e4m3 through its front end, over ragged batches of equal requests, which are dense."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..candidate import Candidate, Unsupported
from .case import BatchCase
from .inputs import BatchInputs

NAME = "cudnn_fp8"


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One graph with outputs of 16 bits where this cuDNN has them, else with outputs of e4m3."""
    if inputs.tables is not None or len(set(zip(case.q_lens, case.kv_lens, strict=True))) > 1:
        raise Unsupported("cuDNN's graph is given requests of one length, without pages")
    try:
        import cudnn  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        raise Unsupported(f"cuDNN's front end cannot be loaded: {error}") from error
    import torch

    reasons = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        try:
            call, out = _graph(cudnn, case, inputs, dtype)
        except Exception as error:  # its exceptions have no common class of their own
            reasons.append(str(error)[:120])
            continue
        note = "" if dtype is torch.bfloat16 else "outputs are e4m3"
        output = functools.partial(_rows, out, (1, -1, case.num_qo_heads, case.head_dim_vo))
        return [Candidate(NAME, "graph", call, output, note=note)]
    raise Unsupported("cuDNN has no plan: " + "; ".join(reasons))


def _rows(out: Any, shape: tuple[int, ...], _: Any) -> Any:
    import torch

    return out.transpose(1, 2).to(torch.bfloat16).reshape(shape)


def _graph(
    cudnn: Any, case: BatchCase, inputs: BatchInputs, dtype: Any
) -> tuple[Callable[[], Any], Any]:
    """A call, and its output [batch, heads, rows, head dim] of this dtype."""
    import torch

    device, kinds = inputs.q.device, cudnn.data_type
    e4m3, real = kinds.FP8_E4M3, kinds.FLOAT
    arrays = [
        x.view(case.batch, -1, *x.shape[1:]).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)
    ]
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=real, compute_data_type=real)

    def tensor(name: str, x: Any, kind: Any) -> Any:
        return graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind)

    one = torch.ones(1, 1, 1, 1, device=device)
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: tensor(name, one, real) for name in names}
    ins = [tensor(name, x, e4m3) for name, x in zip("qkv", arrays, strict=True)]
    mask: dict[str, Any] = {}
    if case.causal:
        mask["use_causal_mask"] = True
    if case.window_left >= 0:
        mask["diagonal_band_left_bound"] = case.window_left + 1
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        q=ins[0], k=ins[1], v=ins[2], **scales, generate_stats=False,
        attn_scale=1.0 / math.sqrt(case.head_dim_qk), **mask,
    )  # fmt: skip
    shape = (case.batch, case.q_lens[0], case.num_qo_heads, case.head_dim_vo)
    out = torch.empty(shape, device=device, dtype=dtype).transpose(1, 2)
    kind = kinds.BFLOAT16 if dtype is torch.bfloat16 else e4m3
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(kind)
    largest = [torch.empty(1, 1, 1, 1, device=device) for _ in range(2)]
    for x in (amax_s, amax_o):
        x.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(real)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    space = torch.empty(max(1, graph.get_workspace_size()), device=device, dtype=torch.uint8)
    bound = dict(zip(ins, arrays, strict=True)) | dict.fromkeys(scales.values(), one)
    bound |= {o: out, amax_s: largest[0], amax_o: largest[1]}
    return lambda: graph.execute(bound, space), out
