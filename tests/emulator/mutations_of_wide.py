"""Mistakes in wide_sm80: where keys lie, what warps share, and when."""

from __future__ import annotations

from .mutation import Mutation

_BARRIER = "ptx::block_sync();"

WIDE = (
    # Where keys and queries lie.
    Mutation("lse-in-base-2", "lse * params.lse_scale", "lse", "latent natural"),
    Mutation("wide-page-of-another-request", "request.kv_start + entry", "entry", "latent"),
    Mutation("wide-absent-key-read", "Config::kSparse && found < 0", "false", "latent list"),
    Mutation(
        "rope-part-of-another-key",
        "second[row] = paged_row(at.page, at.slot,",
        "second[row] = paged_row(at.page, 0,",
        "latent",
    ),
    Mutation(
        "rope-part-of-another-head",
        "shared.q_rope_offset[r] = (static_cast<int64_t>(work.request.q_start) + row.token)",
        "shared.q_rope_offset[r] = (static_cast<int64_t>(0) + row.token)",
        "latent",
    ),
    Mutation(
        "gaps-between-requests-lost",
        "token / request_tokens * gap",
        "0",
        "portable requests of lists",
    ),
    Mutation(
        "entries-beyond-the-cache",
        "static_cast<uint32_t>(num_slots)",
        "0x80000000u",
        "portable requests of lists",
    ),
    Mutation(
        "lists-without-their-gaps",
        "index / params.request_tokens * params.list_gap",
        "0",
        "portable requests of lists",
    ),
    Mutation(
        "planned-lists-count-later-tokens",
        "- (params.counts_later ? later : 0)",
        "",
        "portable requests of lists",
    ),
    Mutation("later-tokens-not-counted", "- later", "", "requests of lists"),
    Mutation("largest-logit-in-base-2", "max * kLn2", "max", "largest logits"),
    Mutation("absent-keys-count", "shared.is_hidden[place][key]", "false", "latent list"),
    # Products.
    Mutation("wide-k-fragment-swapped", "loaded[2 * i]", "loaded[2 * i + 1]", "latent"),
    Mutation("odd-steps-lost", "s[0][0][e] += odd[e];", ";", "latent"),
    Mutation(
        "columns-of-another-warp",
        "ptx::shared_address(values(stage)) + "
        "VTile::offset(lane & 15, (lane >> 4) + kChunksOfWarp * warp)",
        "ptx::shared_address(values(stage)) + VTile::offset(lane & 15, lane >> 4)",
        "latent",
    ),
    # Softmax.
    Mutation("maximum-of-one-warp", "w < kKeyWarps", "w < 1", "steep latent"),
    Mutation("wide-output-not-rescaled", "multiply_rows(o, factors);", ";", "steep latent"),
    Mutation("sums-of-one-warp", "w < kKeyWarps", "w < 1", "latent"),
    # Barriers.
    Mutation("wide-bad-keys-read-early", _BARRIER, "", "bad latent values"),
    Mutation("wide-stage-awaited-too-late", "kStages - 2", "kStages - 1", "long latent"),
    Mutation("wide-warps-not-awaited", _BARRIER, "", "long latent"),
    Mutation("maxima-read-early", _BARRIER, "", "latent"),
    Mutation("probabilities-read-early", _BARRIER, "", "latent"),
    Mutation("wide-states-read-early", _BARRIER, "", "latent"),
)
