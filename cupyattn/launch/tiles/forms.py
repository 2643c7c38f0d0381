"""The forms in which a device may serve queries of 8 bits: as they are, or widened ahead."""

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


class Form(NamedTuple):
    """One way to serve a problem.

    name     which arrays become float16, by a launch ahead of attention or in its kernels as they
             are read; one of FORMS
    problem  what kernels of attention then serve
    """

    name: str
    problem: AttentionProblem


def forms_of(problem: AttentionProblem, target: Target) -> tuple[Form, ...]:
    """Every form of a problem on a device. The first serves requests of any number of rows by one
    order of sums where kernels multiply 8 bits, and so all whose order the caller fixes."""
    if not problem.is_8bit:
        return (Form(AS_THEY_ARE, problem),)
    result, wide = [], problem.widened()
    if prefill_sm90.refusal(problem, LARGE, target) is None:
        result.append(Form(AS_THEY_ARE, problem))
    has_hopper, is_portable = refusal_of_hopper(target) is None, not problem.is_wide
    if has_hopper or not is_portable:
        result.append(Form(QUERIES, wide))
    if is_portable and not problem.block_scales:
        result.append(Form(ON_ARRIVAL, replace(wide, dtype_rows=problem.dtype_q)))
    if _may_widen_keys(problem):
        result.append(Form(ALL, all_widened(problem)))
    return tuple(result)


def form_name(spec: AttentionSpec, problem: AttentionProblem) -> str:
    """The name of the form in which kernels of a problem serve what a caller asks for."""
    if problem.dtype_kv is not spec.dtype_kv:
        return ALL
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
