"""What the Configs of all attention kernels have in common, and members of their shared memory."""

from __future__ import annotations

from ... import jit
from ...core import expression_cuda
from ...core.dtypes import bfloat16
from ...core.problem import MASK_FORMS, AttentionProblem
from .config import Field, round_up

# kernels/cupyattn/attention: RowInfo, LogitConstants, NonFiniteKeys.
ROW_BYTES = 20
LOGIT_BYTES = 32
NONFINITE_BYTES = 8


def tile_field(rows: int, head_dim: int, itemsize: int, count: int = 1) -> Field:
    """`count` tiles (SharedTile): rows of whole 128-byte lines are swizzled, others padded."""
    chunks = round_up(head_dim, 32 if itemsize == 1 else 16) * itemsize // 16
    if chunks % 8 == 0:
        return Field(count * rows * chunks * 16, 128)
    return Field(count * rows * (chunks | 1) * 16, 16)


def common_constants(problem: AttentionProblem, rotates_keys: bool) -> dict[str, jit.Constant]:
    """Constants that every attention kernel has."""
    return {
        "DTypeQ": problem.dtype_q,
        "DTypeKV": problem.dtype_kv,
        "DTypeO": problem.dtype_o,
        "kHeadDimQK": problem.head_dim_qk,
        "kHeadDimVO": problem.head_dim_vo,
        "kRope": problem.pos_encoding == "ROPE_LLAMA",
        "kRotateKeys": rotates_keys,
        "kAlibi": problem.pos_encoding == "ALIBI",
        "kSoftCap": problem.soft_cap,
        # Rows of bf16 that meet fp8 keys are scaled one by one (attention/fp8_query.cuh).
        "kRowScales": problem.prescale_logits
        or (problem.dtype_kv.is_fp8 and problem.dtype_q is bfloat16),
        "kCustomMask": problem.custom_mask,
        "kMaskForm": MASK_FORMS.index(problem.mask_form),
        "kTransform": problem.transforms_logits,
        "LogitsExpression": jit.Members(expression_cuda.members(problem.logits)),
        "kAligned": problem.aligned,
        "kPaged": problem.paged,
        "kOwnValuePages": problem.own_value_pages,
    }
