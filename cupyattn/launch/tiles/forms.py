"""The forms in which a device may serve arrays of 8 bits: as they are, or widened ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...core import dtypes
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from . import prefill_sm90
from .config import Target, refusal_of_hopper
from .row_classes import LARGE

AS_THEY_ARE = ""
ON_ARRIVAL = "q widened on arrival"
QUERIES = "q widened"
ALL = "q, k, v widened"
FORMS = (AS_THEY_ARE, ON_ARRIVAL, QUERIES, ALL)
# Of queries of 16 bits over keys of fp8; as they are otherwise.
KEYS = "k, v widened"


class Form(NamedTuple):
    """One way to serve a problem.

    name     which arrays become float16, or queries' dtype, by a launch ahead of attention or in
             its kernels as they are read; one of FORMS, or KEYS
    problem  what kernels of attention then serve
    """

    name: str
    problem: AttentionProblem


def forms_of(problem: AttentionProblem, target: Target) -> tuple[Form, ...]:
    """Every form of a problem on a device. The first serves requests of any number of rows by one
    order of sums where kernels multiply 8 bits, and so all whose order the caller fixes."""
    has_hopper, is_portable = refusal_of_hopper(target) is None, not problem.is_wide
    if not problem.is_8bit:
        as_they_are = Form(AS_THEY_ARE, problem)
        is_mixed = problem.dtype_kv.is_fp8 and problem.dtype_q.itemsize == 2
        if not (is_mixed and has_hopper and is_portable and _may_widen_keys(problem)):
            return (as_they_are,)
        return (as_they_are, Form(KEYS, replace(problem, dtype_kv=problem.dtype_q)))
    result, wide = [], problem.widened()
    if prefill_sm90.refusal(problem, LARGE, target) is None:
        result.append(Form(AS_THEY_ARE, problem))
    if has_hopper or not is_portable:
        result.append(Form(QUERIES, wide))
    if is_portable and not problem.block_scales:
        result.append(Form(ON_ARRIVAL, replace(wide, dtype_rows=problem.dtype_q)))
    if _may_widen_keys(problem):
        result.append(Form(ALL, all_widened(problem)))
    return tuple(result)


def forms_within(
    spec: AttentionSpec, problem: AttentionProblem, target: Target
) -> tuple[Form, ...]:
    """`forms_of` a problem that a caller asks for, or of one of its forms: that alone."""
    forms = forms_of(problem, target)
    is_form = problem.dtype_q is not spec.dtype_q or problem.dtype_kv is not spec.dtype_kv
    return forms[:1] if is_form else forms


def form_name(spec: AttentionSpec, problem: AttentionProblem) -> str:
    """The name of the form in which kernels of a problem serve what a caller asks for."""
    if problem.dtype_kv is not spec.dtype_kv:
        return ALL if spec.dtype_q.is_8bit_query else KEYS
    if problem.dtype_rows is not None:
        return ON_ARRIVAL
    return AS_THEY_ARE if problem.dtype_q is spec.dtype_q else QUERIES


def all_widened(problem: AttentionProblem) -> AttentionProblem:
    """The problem of queries, keys and values of 8 bits in float16, which holds them all."""
    return replace(problem.widened(), dtype_kv=dtypes.float16, int8_keys=False)


def _may_widen_keys(problem: AttentionProblem) -> bool:
    """Whether keys and values may be widened ahead: those in pages are where they are, a launch
    that rotates keys takes them as they come, and scales of blocks are those of 8 bits."""
    is_in_pages = problem.paged or problem.latent or problem.sparse
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    return not (is_in_pages or is_rotated or problem.block_scales or problem.key_share)
