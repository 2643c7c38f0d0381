"""Mistakes in merging states."""

from __future__ import annotations

from .mutation import Mutation

_MERGE = "cupyattn/attention/merge_states.cuh"

MERGES = (
    Mutation(
        "what an empty state holds counts",
        _MERGE,
        "is_empty ? Chunk{} : v[i]",
        "v[i]",
        "merge pairs",
    ),
    Mutation(
        "empty states beside nothing else weigh something",
        _MERGE,
        "const float weight = is_empty ? 0.0f : ",
        "const float weight = ",
        "merge pairs",
    ),
    Mutation(
        "the sum of weights is not rescaled",
        _MERGE,
        "sum *= factor;",
        "",
        "merge states",
    ),
    Mutation(
        "values are not rescaled",
        _MERGE,
        "c < kCount; ++c) merged[c] *= factor;\n    }",
        "c < kCount; ++c) merged[c] *= 1.0f;\n    }",
        "merge states",
    ),
    Mutation(
        "states after the first batch are lost",
        _MERGE,
        "while (next.count > 0)",
        "if (next.count > 0)",
        "merge states",
    ),
    Mutation(
        "natural logarithms come out in base 2",
        _MERGE,
        "log2f(sum) * params.from_base2",
        "log2f(sum)",
        "merge natural logarithms",
    ),
    Mutation(
        "an LSE is overwritten while others read it",
        _MERGE,
        "ptx::warp_sync();",
        "",
        "merge in place",
    ),
    Mutation(
        "the mask the wrong way round",
        _MERGE,
        "params.mask[row.n] != 0",
        "params.mask[row.n] == 0",
        "merge in place",
    ),
    Mutation(
        "the LSE of the first row's states for all rows",
        _MERGE,
        "state * of_s.m",
        "0",
        "merge segments",
    ),
    Mutation(
        "states that are not there are read",
        _MERGE,
        "end <= params.num_states;",
        "end <= params.num_states + 1;",
        "merge bad offsets",
    ),
    Mutation(
        "another row's head",
        _MERGE,
        "ptx::multiply_high(2 * row, params.heads_magic)",
        "ptx::multiply_high(row, params.heads_magic)",
        "merge pairs",
    ),
    Mutation(
        "lanes past the end of a row take part",
        _MERGE,
        "column < params.head_dim;",
        "column < params.head_dim + 8;",
        "merge pairs",
    ),
    Mutation(
        "chunks of long rows are left out",
        _MERGE,
        "if constexpr (Config::kOneChunk) break;",
        "break;",
        "merge long rows",
    ),
    Mutation(
        "the second of two states is the first once more",
        _MERGE,
        "const int64_t state = Config::kPairs ? i : first;",
        "const int64_t state = Config::kPairs ? 0 : first;",
        "merge two states",
    ),
)
