"""What the Configs of all attention kernels have in common, and members of their shared memory."""

from __future__ import annotations

from ... import jit
from ...core import expression_cuda
from ...core.dtypes import bfloat16
from ...core.problem import MASK_FORMS, AttentionProblem
from .config import Field, round_up

# kernels/cupyattn/shared: RowInfo, LogitConstants, NonFiniteKeys.
ROW_BYTES = 20
LOGIT_BYTES = 32
NONFINITE_BYTES = 8
_PLACEHOLDER = 16
# The swizzle of Hopper's copies and products repeats after so many bytes.
PATTERN_BYTES = 1024


def panels(rows: int, columns: int, count: int, itemsize: int = 2) -> Field:
    """`count` tiles (PanelTile): lines of 128 bytes."""
    return Field(count * rows * round_up(itemsize * columns, 128), PATTERN_BYTES)


def tile_field(rows: int, head_dim: int, itemsize: int, count: int = 1) -> Field:
    """`count` tiles (SharedTile): rows of whole 128-byte lines are swizzled, others padded."""
    chunks = round_up(head_dim, 32 if itemsize == 1 else 16) * itemsize // 16
    if chunks % 8 == 0:
        return Field(count * rows * chunks * 16, 128)
    return Field(count * rows * (chunks | 1) * 16, 16)


def problem_constants(problem: AttentionProblem) -> dict[str, jit.Constant]:
    """Constants by which a kernel is told of its problem."""
    return {
        "DTypeQ": problem.dtype_q,
        "DTypeKV": problem.dtype_kv,
        "DTypeO": problem.dtype_o,
        "kHeadDimQK": problem.head_dim_qk,
        "kHeadDimVO": problem.head_dim_vo,
        "kRope": problem.pos_encoding == "ROPE_LLAMA",
        "kAlibi": problem.pos_encoding == "ALIBI",
        "kSoftCap": problem.soft_cap,
        "kRowScales": problem.prescale_logits,
        "kCustomMask": problem.custom_mask,
        "kMaskForm": MASK_FORMS.index(problem.mask_form),
        "kTransform": problem.transforms_logits,
        "LogitsExpression": jit.Members(expression_cuda.members(problem.logits)),
        "kPaged": problem.paged,
        "kOwnValuePages": problem.own_value_pages,
        **key_constants(problem),
        **share_constants(problem),
        **gate_constants(problem),
    }


def key_constants(problem: AttentionProblem) -> dict[str, jit.Constant]:
    """The dtype of keys where it is not that of values, whether blocks of keys have scales, and the
    dtype of rows of q that become another; of which other kernels are not told."""
    constants: dict[str, jit.Constant] = {}
    if problem.dtype_rows is not None:
        constants["DTypeRows"] = problem.dtype_rows
    if problem.int8_keys:
        constants["DTypeK"] = problem.dtype_k
    if problem.block_scales:
        constants["kBlockScales"] = True
    return constants


def share_constants(problem: AttentionProblem) -> dict[str, jit.Constant]:
    """The constant of kernels whose ranks share keys, which others do not have."""
    return {"kKeyShare": True} if problem.key_share else {}


def gate_constants(problem: AttentionProblem) -> dict[str, jit.Constant]:
    """Constants of a kernel that writes the output, of which those without gates have none."""
    gate = problem.output_gate
    if gate is None:
        return {}
    return {"DTypeGate": gate.dtype, "kGatesElements": gate.of_elements}


def common_constants(problem: AttentionProblem, rotates_keys: bool) -> dict[str, jit.Constant]:
    """Constants of every portable kernel."""
    # Rows of bf16 that meet fp8 keys are scaled one by one (sm80/fp8_query.cuh).
    scales_rows = problem.dtype_kv.is_fp8 and problem.dtype_q is bfloat16
    return problem_constants(problem) | {
        "kRowScales": problem.prescale_logits or scales_rows,
        "kRotateKeys": rotates_keys,
        "kAligned": problem.aligned,
    }


def is_transformed(problem: AttentionProblem) -> bool:
    """True if more than one scale stands between the product and the softmax."""
    return problem.soft_cap or problem.prescale_logits or problem.biases_logits


def row_fields(tile_q: int) -> tuple[Field, ...]:
    """What is known of the rows of Q and their logits."""
    return Field(ROW_BYTES * tile_q, 16), Field(LOGIT_BYTES, 16), Field(8 * tile_q, 8)


def rope_steps(problem: AttentionProblem) -> Field:
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    return Field(4 * (problem.head_dim_qk // 2) if is_rotated else 4)


def widened_keys(problem: AttentionProblem, rows: int, rotates_keys: bool, count: int) -> Field:
    """fp8 keys that are rotated get a 16-bit copy; otherwise the kernels keep a placeholder."""
    if problem.dtype_kv.is_fp8 and rotates_keys:
        return tile_field(rows, problem.head_dim_qk, 2, count)
    itemsize = problem.dtype_kv.itemsize
    return Field(_PLACEHOLDER, tile_field(rows, problem.head_dim_qk, itemsize).align)
