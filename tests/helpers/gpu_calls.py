"""Runs a random case through the public API on poisoned GPU arrays and checks the answer."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import array

from . import cases, compare, poison
from .cases import Case


@dataclass
class Call:
    """One prepared call: arrays on the device, and what must stay untouched."""

    case: Case
    inputs: dict[str, Any]
    arrays: dict[str, Any]
    owned: dict[str, poison.Poisoned]
    out: poison.Poisoned
    lse: poison.Poisoned | None

    @classmethod
    def prepare(cls, case: Case, xp: ModuleType) -> Call:
        inputs = cases.make_inputs(case)
        owned = {}
        for name, kind in zip(("q", "k", "v"), case.strides, strict=False):
            owned[name] = _embed(inputs[name], kind, xp)
        arrays: dict[str, Any] = {name: p.array for name, p in owned.items()}
        for name in ("sinks", "scale_q", "scale_k", "scale_v"):
            value = inputs[name]
            if isinstance(value, np.ndarray):
                owned[name] = poison.embed(value.astype(np.float32), xp=xp)
                value = owned[name].array
            arrays[name] = value
        if inputs["mask"] is not None:
            name = "custom_mask" if case.mask_kind == "bool" else "packed_custom_mask"
            mask = inputs["mask"]
            if case.mask_kind == "packed":
                mask = np.packbits(mask.flatten(), bitorder="little")
            # An odd offset: packed masks need not be aligned.
            owned[name] = poison.embed(mask, xp=xp, offset=case.seed % 5)
            arrays[name] = owned[name].array
        shape = (case.qo_len, case.num_qo_heads, case.head_dim_vo)
        strides = cases.element_strides(case.strides[3], shape)
        out = poison.blank(shape, case.out_dtype, strides, xp=xp)
        lse = poison.blank(shape[:2], np.dtype(np.float32), None, xp=xp)
        return cls(case, inputs, arrays, owned, out, lse if case.return_lse else None)

    def run(self) -> None:
        case, arrays = self.case, self.arrays
        result = cupyattn.single_prefill_with_kv_cache(
            **arrays,
            o_dtype=case.o_dtype,
            causal=case.causal,
            kv_layout=case.kv_layout,
            pos_encoding_mode=case.pos_encoding_mode,
            sm_scale=case.sm_scale,
            window_left=case.window_left,
            logits_soft_cap=case.logits_soft_cap,
            rope_scale=case.rope_scale,
            rope_theta=case.rope_theta,
            return_lse=case.return_lse,
            out=self.out.array,
            lse=None if self.lse is None else self.lse.array,
        )
        assert (result[0] if case.return_lse else result) is self.out.array

    def check(self) -> None:
        case = self.case
        ref_o, ref_lse = cases.reference(case, self.inputs)
        low_o, low_lse = cases.low_precision(case, self.inputs)
        lse = None if self.lse is None else self.lse.values()
        p_dtype = array.view(self.inputs["q"], "q").dtype.numpy
        compare.assert_close(
            self.out.values(),
            lse,
            ref_o,
            ref_lse,
            low_o,
            low_lse,
            case,
            p_dtype=p_dtype,
            logit_magnitude=cases.logit_magnitude(case),
        )
        for name, poisoned in {**self.owned, "out": self.out, "lse": self.lse}.items():
            if poisoned is not None:
                poisoned.assert_intact(f"{case}: {name}")


def _embed(values: np.ndarray, kind: str, xp: ModuleType) -> poison.Poisoned:
    return poison.embed(values, cases.element_strides(kind, values.shape), xp=xp)


def run_case(case: Case, xp: ModuleType) -> None:
    """Prepare, run and check one case."""
    call = Call.prepare(case, xp)
    call.run()
    call.check()
