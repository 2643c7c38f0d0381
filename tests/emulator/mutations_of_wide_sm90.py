"""Mistakes in wide_sm90: columns, pieces of a tile, and what its warpgroups tell each other."""

from __future__ import annotations

from .mutation import Mutation

WIDE_SM90 = (
    Mutation(
        "largest-logit-of-a-tile",
        "fmaxf(largest[h], largest_of(s[0], h))",
        "largest_of(s[0], h)",
        "hopper largest logits",
    ),
    Mutation("wide-values-of-the-leader", "piece *", "0 *", "hopper wide"),
    Mutation("wide-rope-not-multiplied", "VTile::kPanels", "2 * kPanelsOfPiece", "hopper wide"),
    Mutation("wide-p-chunks-overlap", "32 * i", "16 * i", "hopper wide"),
    Mutation(
        "wide-normaliser-of-the-upper-row", "rows.own_row(1)", "rows.own_row(0)", "hopper wide"
    ),
    Mutation("wide-values-not-added", "true", "false", "hopper wide"),
    Mutation(
        "wide-keys-not-awaited",
        "await_phase(shared.full[stage.stage][kPiece], stage.parity);",
        "",
        "hopper wide",
    ),
    Mutation(
        "wide-p-overwritten", "await_phase(shared.empty_p, turn.p_parity ^ 1);", "", "hopper wide"
    ),
    Mutation("wide-p-not-awaited", "await_phase(shared.full_p, p_parity);", "", "hopper wide"),
    Mutation(
        "wide-piece-not-awaited",
        "await_phase(shared.empty[stage.stage][kPiece], stage.parity ^ 1);",
        "",
        "hopper wide",
    ),
    Mutation(
        "wide-normalisers-not-awaited",
        "await_phase(shared.full_normalisers[place], turn.count >> 1 & 1);",
        "",
        "hopper wide",
    ),
    Mutation("wide-page-of-the-same-tile", "tile - 1", "tile", "hopper wide"),
    Mutation("wide-query-past-the-last", "r < work.num_rows", "r <= work.num_rows", "hopper wide"),
    Mutation("wide-keys-past-the-end", "page < 0", "page < -1", "hopper wide"),
    Mutation("wide-rope-of-first-head", "head * latent.q_rope_stride_h", "0", "hopper wide apart"),
    Mutation(
        "wide-rope-page-by-latent-stride",
        "latent.k_rope_stride_page",
        "params.k_stride_page",
        "hopper wide apart",
    ),
    Mutation("wide-hidden-keys-marked", "own.first != nullptr", "1", "hopper wide sparse"),
    Mutation("wide-missing-keys-seen", "!exists", "false", "hopper wide sparse"),
    Mutation("wide-lacking-keys-overlooked", "0x01010101u", "marks", "hopper wide sparse"),
    Mutation(
        "halves-first-output-not-rescaled",
        "i > 0 && unlikely",
        "false && unlikely",
        "hopper wide sparse steep",
    ),
    Mutation(
        "halves-second-output-not-rescaled",
        "if (unlikely(probabilities.raised)) multiply_rows(o, probabilities.factors);",
        "",
        "hopper wide sparse steep",
    ),
    Mutation(
        "halves-other-p-kept",
        "this->release(shared.empty[1][1]);",
        "",
        "hopper wide sparse steep",
    ),
    Mutation(
        "halves-p-not-awaited",
        "await_phase(shared.halves().full_p[kPlace], parity);",
        "",
        "hopper wide sparse steep",
    ),
    Mutation("halves-output-under-old-maxima", "has_output", "false", "hopper wide sparse steep"),
    Mutation(
        "halves-maxima-not-taken-over",
        "softmax.online.row_max[0][h] = raised.maxima[rows.own_row(h)];",
        "",
        "hopper wide sparse steep",
    ),
    Mutation(
        "halves-sums-under-old-maxima", "*= factors[0][h]", "*= 1.0f", "hopper wide sparse steep"
    ),
    Mutation("halves-sums-not-added", "+=", "=", "hopper wide sparse steep"),
    Mutation(
        "lists-piece-not-awaited",
        "await_phase(shared.empty[stage.stage][kPiece], stage.parity ^ 1);",
        "",
        "hopper wide sparse",
    ),
    Mutation(
        "lists-of-the-next-block", "(gridDim.y)", "(gridDim.y) + 1", "hopper wide lists in turn"
    ),
    Mutation(
        "wide-keys-kept",
        "this->release(shared.empty[stage.stage][Traits::kKeys]);",
        ";",
        "hopper wide ordinary",
    ),
    Mutation(
        "wide-values-not-awaited",
        "await_phase(shared.full[stage.stage][Traits::kOfLeader], stage.parity);",
        "",
        "hopper wide ordinary",
    ),
    Mutation("wide-values-by-stride-of-keys", "v_stride_n", "k_stride_n", "hopper wide ordinary"),
    Mutation(
        "wide-hidden-values-stay",
        "this->zero_nonfinite_values(item, tile, stage);",
        "",
        "hopper wide hidden",
    ),
    Mutation(
        "wide-nonfinite-values-not-added",
        "this->add_nonfinite_values(item, swept_tile, stage, probabilities.p);",
        ";",
        "hopper wide hidden",
    ),
    Mutation("wide-page-of-the-first-box", "+ at.page", "", "hopper wide boxes"),
    Mutation(
        "wide-tma-piece-not-awaited",
        "await_phase(shared.empty[stage.stage][kPiece], stage.parity ^ 1);",
        "",
        "hopper wide boxes",
    ),
    Mutation("wide-boxes-in-one-place", "box * all_params.box_rows", "0", "hopper wide boxes"),
    Mutation(
        "merged-columns-of-the-first-part", "index % kParts", "0", "hopper wide launched merge"
    ),
    Mutation("lists-in-one-place", "request * kv_step", "0", "hopper wide lists"),
    Mutation(
        "wide-item-read-early",
        "await_phase(shared.full_item[place_of(count)], (count - 1) >> 1 & 1);",
        "",
        "hopper wide links",
    ),
    Mutation(
        "wide-item-overwritten",
        "await_phase(shared.empty_item[place_of(count + 1)], (count - 1) >> 1 & 1);",
        "",
        "hopper wide links",
    ),
    Mutation(
        "wide-queries-overwritten",
        "if constexpr (Traits::kLinked) await_phase(shared.empty_q, q_parity);",
        "",
        "hopper wide links",
    ),
    Mutation(
        "wide-merged-rows-overwritten",
        "if (Traits::kLinked) sync();",
        "",
        "hopper wide links",
    ),
    Mutation(
        "wide-cut-not-at-the-end", "min_of(part.end, span.end)", "span.end", "hopper wide cuts"
    ),
    Mutation("wide-state-columns-of-the-leader", "+ first_column", "", "hopper wide splits"),
    Mutation(
        "wide-leader-output-not-rescaled",
        "if (unlikely(probabilities.raised)) multiply_rows(o, probabilities.factors);",
        "",
        "hopper wide steep",
    ),
    Mutation(
        "wide-follower-output-not-rescaled", "multiply_rows(o, factors);", "", "hopper wide steep"
    ),
    Mutation("wide-rest-of-tiles-lost", "+ min_of(split, rest)", "", "hopper wide splits"),
    Mutation(
        "wide-raised-maxima-not-told",
        "factors[m][h] != 1.0f",
        "false",
        "hopper wide ordinary steep",
    ),
    # wide_decode_sm90
    Mutation(
        "wide-decode-keys-not-awaited",
        "await_phase(shared.full[stage.stage][kPiece], stage.parity);",
        "",
        "hopper few rows",
    ),
    Mutation("wide-decode-missing-keys-seen", "!= 0", ">= 0", "hopper few rows sparse"),
    Mutation("wide-decode-hidden-keys-seen", "|| key >= limits.end", "", "hopper few rows"),
    Mutation("wide-decode-maximum-of-some-keys", "mask = 4", "mask = 8", "hopper few rows steep"),
    Mutation("wide-decode-maxima-read-early", "sync();", "", "hopper few rows"),
    Mutation(
        "wide-decode-sum-not-rescaled", "*= factors[n][e]", "*= 1.0f", "hopper few rows steep"
    ),
    Mutation("wide-decode-output-not-rescaled", "e < 4", "e < 3", "hopper few rows steep"),
    Mutation("wide-decode-p-of-other-keys", "2 * i + h", "2 * i + 1 - h", "hopper few rows"),
    Mutation("wide-decode-p-read-early", "sync();", "", "hopper few rows"),
    Mutation(
        "wide-decode-bad-values-reach-all-rows",
        "p[n][e] != 0.0f",
        "true",
        "hopper few rows hidden",
    ),
    Mutation("wide-decode-sums-read-early", "sync_consumers();", "", "hopper few rows"),
    Mutation("wide-decode-sum-of-a-warp", "sums.x + sums.y", "sums.x", "hopper few rows"),
    Mutation("wide-decode-factors-read-early", "sync_consumers();", "", "hopper few rows"),
    Mutation("wide-decode-output-read-early", "sync_consumers();", "", "hopper few rows"),
    Mutation("wide-decode-weights-read-early", "sync();", "", "hopper few rows splits"),
    Mutation("wide-decode-flag-read-early", "sync();", "", "hopper few rows splits"),
    Mutation(
        "wide-decode-weights-of-some-splits", "mask = 1", "mask = 2", "hopper few rows splits"
    ),
    Mutation("wide-fp8-queries-overwritten", "ptx::warp_sync();", "", "hopper few rows fp8"),
    Mutation("wide-fp8-rows-not-scaled", "scale.of_logits", "1.0f", "hopper few rows fp8"),
    Mutation("wide-fp8-queries-read-early", "sync_consumers();", ";", "hopper few rows fp8"),
    Mutation("wide-fp8-other-columns", "lane >> 2", "lane >> 3", "hopper few rows fp8"),
    Mutation(
        "wide-scales-of-the-first-token", "[own.token]", "[0]", "hopper few rows token scales"
    ),
    Mutation("wide-fp8-scale-of-the-lower-key", "upper_scale", "scale", "hopper few rows scales"),
    Mutation("wide-fp8-scales-of-the-largest", "? found", "? 1.0f", "hopper few rows scales"),
    Mutation(
        "wide-decode-tiles-of-the-first-consumer",
        "if (index > 0) stage.advance();",
        "",
        "hopper few rows fp8",
    ),
    Mutation(
        "wide-decode-consumers-weigh-alike", "weights[i] * factor", "factor", "hopper few rows fp8"
    ),
    Mutation("wide-decode-output-added-early", "sync_consumers();", "", "hopper few rows fp8"),
    # Producers that convert, and queries of float16
    Mutation(
        "wide-queries-read-early",
        "ptx::named_barrier_sync_unaligned(kBarrier, kWarps * kWarpSize);",
        "",
        "hopper wide fp8",
    ),
    Mutation("wide-rope-of-queries-not-scaled", "kPanels - 1", "kPanels", "hopper wide fp8 boxes"),
    Mutation("wide-rows-not-scaled", "scale.of_logits", "1.0f", "hopper wide fp8 small queries"),
    Mutation(
        "wide-converter-boxes-not-awaited",
        "await_phase(shared.landed[stage.stage][Traits::kOfFollower], stage.parity);",
        "",
        "hopper wide fp8 boxes",
    ),
    Mutation(
        "wide-converter-rope-overwritten",
        "ptx::named_barrier_sync(kBarrier, kWarps * kWarpSize);",
        "",
        "hopper wide fp8 boxes",
    ),
    Mutation(
        "wide-converter-place-not-awaited",
        "await_phase(shared.empty[stage.stage][Traits::kOfFollower], stage.parity ^ 1);",
        "",
        "hopper wide fp8",
    ),
    Mutation(
        "wide-converter-page-of-the-same-tile", "tile - kProducers", "tile", "hopper wide fp8"
    ),
    Mutation("wide-converter-absent-key-read", "from != nullptr", "true", "hopper wide fp8"),
    Mutation(
        "wide-converter-copies-not-awaited",
        "ptx::cp_async_wait_group<1>();",
        "",
        "hopper wide fp8",
    ),
    Mutation("wide-converter-overwritten", "ptx::warp_sync();", "", "hopper wide fp8"),
    Mutation(
        "wide-converter-hidden-keys-marked", "!= nullptr", "== nullptr", "hopper wide fp8 sparse"
    ),
    Mutation(
        "wide-converter-scale-of-the-first-columns",
        "pair == 0 ?",
        "pair >= 0 ?",
        "hopper wide fp8 scales",
    ),
    Mutation(
        "wide-converter-scale-of-another-token",
        "[token]",
        "[0]",
        "hopper wide fp8 token scales",
    ),
    Mutation("wide-converter-entry-of-the-first-list", "key - before", "key", "listed rows"),
    Mutation("wide-converter-row-of-the-first-cache", "list_of(key)", "list_of(0)", "listed rows"),
    Mutation("wide-converter-scales-of-the-first-slot", "8 * offset", "0", "listed rows"),
    Mutation("wide-converter-scale-of-another-panel", "panel / 4", "panel / 8", "listed rows"),
)
