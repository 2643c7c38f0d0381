"""Calls of one request, through the public functions, on poisoned arrays."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

import cupyattn

from . import calls, cases
from .cases import Case


class Call(calls.Call):
    """is_decode: through `single_decode_with_kv_cache`, for cases of one row."""

    def __init__(self, case: Case, xp: ModuleType, *, is_decode: bool = False) -> None:
        super().__init__(case, xp)
        self.is_decode = is_decode
        self.inputs = inputs = cases.make_inputs(case)
        self.q = inputs["q"]
        self.answer_shape = case.num_qo_heads, case.head_dim_vo, case.out_dtype
        self.head_dim_qk = case.head_dim_qk
        self.has_coarse_cap = cases.has_coarse_cap(case)
        self.logit_magnitude = cases.logit_magnitude(case)
        self.arrays: dict[str, Any] = {
            name: self.embed(name, inputs[name], cases.element_strides(kind, inputs[name].shape))
            for name, kind in zip("qkv", case.strides, strict=False)
        }
        for name in ("sinks", "scale_q", "scale_k", "scale_v"):
            value = inputs[name]
            if isinstance(value, np.ndarray):
                value = self.embed(name, value.astype(np.float32))
            self.arrays[name] = value
        if inputs["mask"] is not None:
            name = "custom_mask" if case.mask_kind == "bool" else "packed_custom_mask"
            mask = inputs["mask"]
            if case.mask_kind == "packed":
                mask = np.packbits(mask.flatten(), bitorder="little")
            # An odd offset: packed masks need not be aligned.
            self.arrays[name] = self.embed(name, mask, offset=case.seed % 5)
        shape = (case.qo_len, case.num_qo_heads, case.head_dim_vo)
        strides = cases.element_strides(case.strides[3], shape)
        self.out = self.blank("out", shape, case.out_dtype, strides)
        self.lse = self.blank("lse", shape[:2], np.float32) if case.return_lse else None

    def start(self) -> None:
        case, out = self.case, self.out.array
        lse = None if self.lse is None else self.lse.array
        self.returned = out, lse
        options = {
            "kv_layout": case.kv_layout,
            "pos_encoding_mode": case.pos_encoding_mode,
            "sm_scale": case.sm_scale,
            "window_left": case.window_left,
            "logits_soft_cap": case.logits_soft_cap,
            "rope_scale": case.rope_scale,
            "rope_theta": case.rope_theta,
            "return_lse": case.return_lse,
        }
        if self.is_decode:
            names = {"scale_q": "q_scale", "scale_k": "k_scale", "scale_v": "v_scale"}
            arrays = {names.get(name, name): x for name, x in self.arrays.items()}
            arrays["q"], out = arrays["q"][0], out[0]
            lse = None if lse is None else lse[0]
            result = cupyattn.single_decode_with_kv_cache(**arrays, **options, out=out, lse=lse)
        else:
            result = cupyattn.single_prefill_with_kv_cache(
                **self.arrays,
                **options,
                o_dtype=case.o_dtype,
                causal=case.causal,
                window_right=case.window_right,
                out=out,
                lse=lse,
            )
        assert (result[0] if case.return_lse else result) is out

    def requests(self) -> list[dict[str, Any]]:
        return [cases.arguments(self.case, self.inputs)]

    def expected(self) -> tuple[calls.States, calls.States]:
        ref = cases.reference(self.case, self.inputs)
        return list(ref), list(cases.low_precision(self.case, self.inputs))
