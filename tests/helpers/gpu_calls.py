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

    def run(self, *, is_decode: bool = False) -> None:
        """Make the call; is_decode: through `single_decode_with_kv_cache`, for cases of one row."""
        case = self.case
        out = self.out.array
        lse = None if self.lse is None else self.lse.array
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
        if is_decode:
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
                out=out,
                lse=lse,
            )
        assert (result[0] if case.return_lse else result) is out

    def check(self, *, may_be_hoppers: bool = True) -> None:
        """may_be_hoppers: whether prefill_sm90 may have served it."""
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
            has_coarse_cap=may_be_hoppers and cases.has_coarse_cap(case),
        )
        for name, poisoned in {**self.owned, "out": self.out, "lse": self.lse}.items():
            if poisoned is not None:
                poisoned.assert_intact(f"{case}: {name}")

    def answers(self) -> list[np.ndarray]:
        """Copies of what the call has written: out, and lse if there is one."""
        return [p.values() for p in (self.out, self.lse) if p is not None]

    def rerun(self, *, is_decode: bool = False) -> None:
        """Call again on a blank output, and fail unless every bit comes out the same."""
        first = self.answers()
        for p in (self.out, self.lse):
            if p is not None:
                raw(p.array)[...] = 0
        self.run(is_decode=is_decode)
        for a, b in zip(first, self.answers(), strict=True):
            compare.assert_bitwise_equal(a, b, self.case)


def raw(x: Any) -> Any:
    """The same memory as integers: bf16 and fp8 are no dtypes for CuPy's own kernels."""
    name = f"int{8 * x.dtype.itemsize}"
    if type(x).__module__ == "torch":
        import torch

        return x.view(getattr(torch, name))
    return x.view(name)


def upload(values: np.ndarray, xp: ModuleType) -> Any:
    """A plain copy of `values` on the device."""
    return poison.embed(values, guard=0, xp=xp).array


def download(x: Any) -> np.ndarray:
    """A copy of an array of the device."""
    return array.to_host(array.view(x, "x")).copy()


def _embed(values: np.ndarray, kind: str, xp: ModuleType) -> poison.Poisoned:
    return poison.embed(values, cases.element_strides(kind, values.shape), xp=xp)


def run_case(case: Case, xp: ModuleType, *, is_decode: bool = False) -> None:
    """Prepare, run, check against the float64 answer, and run again for the same bits."""
    call = Call.prepare(case, xp)
    call.run(is_decode=is_decode)
    call.check(may_be_hoppers=xp is not np)
    call.rerun(is_decode=is_decode)
