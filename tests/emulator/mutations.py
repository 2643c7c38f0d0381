"""Mistakes in the portable kernels and in what all kernels share."""

from __future__ import annotations

from .mutation import Mutation

_BARRIER = "ptx::block_sync();"
_WARP_BARRIER = "ptx::warp_sync();"

EXCHANGE = (
    Mutation("empty-rank-weighs", "lse == -ptx::infinity()", "false", "exchange"),
    Mutation("rank-sum-not-rescaled", "sum * factor", "sum", "exchange"),
    Mutation("epoch-stays", "epoch + 1", "epoch", "halves of a window"),
    Mutation("states-past-the-last", "state >= params.num_states", "false", "exchange"),
    Mutation("one-half-for-all-epochs", "epoch & 1", "0", "halves of a window"),
    Mutation("late-peer-hidden", "ptx::nan()", "merged[i].sum", "late peer"),
    Mutation(
        "lateness-untold", "ptx::store_system(params.status, source + 1)", "return", "late peer"
    ),
)

PORTABLE = (
    *EXCHANGE,
    # Barriers and waits for copies.
    Mutation("keys-used-before-barrier", _BARRIER, "", "prefill"),
    Mutation("values-used-before-barrier", _BARRIER, "", "prefill"),
    Mutation("row-table-read-before-barrier", _BARRIER, "", "prefill"),
    Mutation(
        "output-overwrites-q",
        "if constexpr (kStagesOutput) ptx::warp_sync();",
        "",
        "few rows of 128",
    ),
    Mutation("staged-output-read-early", _WARP_BARRIER, "", "prefill"),
    Mutation("rotated-keys-read-early", _BARRIER, "", "rope in the block"),
    Mutation("permuted-q-read-early", _BARRIER, "", "fp8"),
    Mutation("bad-keys-read-early", _BARRIER, "", "bad values"),
    Mutation("half-warp-skips-barrier", _BARRIER, "if (lane < 16) ptx::block_sync();", "prefill"),
    Mutation("prefill-values-not-awaited", "group<0>", "group<1>", "prefill"),
    Mutation("stage-awaited-too-late", "kStages - 2", "kStages - 1", "decode"),
    Mutation("lanes-not-awaited", _WARP_BARRIER, "", "decode"),
    Mutation("stage-not-committed", "ptx::cp_async_commit();", "", "decode"),
    Mutation("states-overwrite-ring", _BARRIER, "", "decode"),
    Mutation("warp-states-read-early", _BARRIER, "", "decode"),
    Mutation("page-offsets-read-early", _WARP_BARRIER, "", "paged decode"),
    Mutation("last-block-flag-read-early", _BARRIER, "", "split decode"),
    Mutation("block-states-read-early", "ptx::cluster_wait();", "", "clusters"),
    Mutation("block-ends-early", "ptx::cluster_wait();", "", "clusters"),
    Mutation("shares-read-early", _BARRIER, "", "split prefill"),
    # Fragments and fp8.
    Mutation("k-fragment-swapped", "b[i][0], b[i][1]", "b[i][1], b[i][0]", "prefill"),
    Mutation("values-not-transposed", "ldmatrix_x4_trans", "ldmatrix_x4", "prefill"),
    Mutation(
        "k-lanes-swapped",
        "((lane >> 4) << 3), (lane >> 3) & 1",
        "(((lane >> 3) & 1) << 3), lane >> 4",
        "prefill",
    ),
    Mutation("p-fragment-swapped", "2 * half + h", "2 * h + half", "prefill"),
    Mutation("fp8-value-columns-swapped", "0, 2>", "0, 1>", "fp8"),
    Mutation("fp8-q-columns-swapped", "a.word[2], b.word[0]", "b.word[0], a.word[2]", "fp8"),
    Mutation("row-power-not-undone", "127 - shift", "127", "fp8"),
    Mutation("e4m3-power-lost", "0x5c005c00u", "0x58005800u", "fp8 by shifts"),
    # Softmax and states.
    Mutation("output-not-rescaled", "o[m][n][2 * h + 1] *= factor;", "", "steep"),
    Mutation("sum-not-rescaled", "row_sum[m][h] *= factor;", "", "steep"),
    Mutation(
        "decode-maximum-is-lazy",
        "0.0f",
        "LogitsVariant::softmax_slack(params)",
        "largest probability",
    ),
    Mutation("maximum-of-half-a-quad", "fmaxf(x, ptx::shuffle_xor(x, 2))", "x", "steep"),
    Mutation("sum-of-half-a-quad", "x + ptx::shuffle_xor(x, 2)", "x", "prefill"),
    Mutation("warp-sums-not-weighted", "weight *", "", "steep decode"),
    Mutation(
        "split-weights-inverted",
        "lse - merged.state.max",
        "merged.state.max - lse",
        "split prefill",
    ),
    Mutation("state-of-another-head", "+ kv_head * num_splits", "", "split prefill"),
    Mutation("sink-not-in-sum", "+ weight", "", "sinks"),
    Mutation("no-keys-divides-by-zero", "sum == 0.0f || (old_max", "false && (old_max", "no keys"),
    # Values that are not finite.
    Mutation("bad-values-stay", "& ~holes.word[w]", "", "bad values"),
    Mutation("bad-values-reach-all-rows", "(p[m][h] != 0.0f ? bad : 0.0f)", "bad", "bad values"),
    Mutation("bad-value-of-another-key", "((key & 7) >> 1)", "(key & 3)", "bad values"),
    # RoPE, ALiBi, soft cap.
    Mutation("rope-inverted", "x[0] * cosine[0] - y", "x[0] * cosine[0] + y", "rope in the block"),
    Mutation("rope-position-of-token", ".position", ".token", "rope in the block"),
    Mutation("keys-rotated-too-far", "(key)", "(key) + 1", "rope ahead"),
    Mutation("gate-upside-down", "-kLog2e", "kLog2e", "gates"),
    Mutation("gate-of-another-head", "head * gate.stride_h", "0", "gates"),
    Mutation("gates-of-first-columns", "first_column + ", "", "gates of wide heads"),
    Mutation("alibi-of-the-pair", "8 * n + e", "8 * n", "alibi"),
    Mutation("alibi-from-row-index", "row.position", "row.token", "alibi"),
    Mutation("soft-cap-range-too-wide", "? tanh.range", "? 4.0f * tanh.range", "soft cap"),
    Mutation(
        "soft-cap-maximum-stays",
        "kRescaleThreshold)",
        "8.0f * kRescaleThreshold)",
        "large soft cap",
    ),
    Mutation(
        "soft-cap-of-alibi-too-wide",
        "0x40000000u",
        "0x80000000u & 0x7fffffffu",
        "soft cap of alibi",
    ),
    # Addresses.
    Mutation("absent-row-read", "row_exists && exists", "exists", "prefill"),
    Mutation("row-past-the-end-read", "row < end_row", "row <= end_row", "prefill"),
    Mutation("row-past-the-last-written", "row >= work.num_rows", "row > work.num_rows", "prefill"),
    Mutation("page-slot-of-next-key", "key)", "key + 1)", "paged prefill"),
    Mutation("next-page", "page]", "page + 1]", "paged prefill"),
    Mutation("pages-of-last-tile", "kBuffers)", "kBuffers + 1)", "paged prefill"),
    Mutation("requests-overlap", "request.q_start +", "", "paged decode"),
    Mutation(
        "page-number-halved",
        "2u * static_cast<uint32_t>(n)",
        "static_cast<uint32_t>(n)",
        "odd pages",
    ),
    Mutation("page-past-the-pool", "page >= table", "page > table", "append"),
    Mutation("page-offset-of-next-position", "position %", "(position + 1) %", "append"),
    Mutation("upper-half-of-a-vector", "stored[half]", "stored[0]", "copied rows"),
    Mutation("columns-of-zeros-lost", "target[i] = To{};", "", "copied rows"),
    Mutation("slot-past-the-cache", "slot <", "slot <=", "slots"),
    Mutation("share-counts-runs-of-others", "periods * run +", "periods * period +", "shares"),
    Mutation("tokens-of-others-appended", "own < 0", "own < -1", "shares"),
    Mutation("lists-by-the-first-table", "row / params.rows_of_table", "0", "shares"),
    Mutation("lists-with-holes", "count + before", "at", "shares"),
    Mutation("quotients-of-infinities", ": q;", ": corrected;", "wide values"),
    # Metadata of serving steps.
    Mutation(
        "chunk-rows-begin-with-the-chunk", "max_of(begin, first_position)", "begin", "serving"
    ),
    Mutation("chunk-keys-begin-with-the-row", "max_of(begin, 0)", "max_of(low, 0)", "serving"),
    Mutation("pages-of-the-first-step", "params.num_steps - 1", "0", "serving"),
    Mutation("second-pool-begins-with-the-row", "position - params.swa_window", "low", "serving"),
    Mutation("mask-without-its-prefix", "own + token", "token", "serving"),
    Mutation("hidden-drafts-first", "is_seen ?", "!is_seen ?", "serving"),
    Mutation("path-skips-nothing", "n > 0", "n > 1", "serving"),
    Mutation("window-without-its-row", "position - window", "position - window + 1", "serving"),
    Mutation("prefix-of-whole-request", "seq_len - low", "seq_len", "serving"),
    Mutation("window-inside-the-drafts", "max_of(low - seq_len, 0)", "0", "serving"),
    Mutation("rows-end-with-the-last-request", "rows_before + q_len", "rows_before", "serving"),
    Mutation("beams-keep-their-parent", "- row", "- row - 1", "serving"),
    # Packed bits.
    Mutation("bit-order-inverted", "bit : 7 - bit", "7 - bit : bit", "packbits"),
    Mutation("byte-of-last-segment", "<= index", "< index", "packbits"),
    Mutation(
        "bool-rows-share-bytes",
        "segment * length + 8 * (index - segment * bytes)",
        "8 * index",
        "verify",
    ),
    # Causality and windows.
    Mutation("causality-off-by-one", "position + 1", "position", "causal"),
    Mutation("causality-top-left", "token + kv_len - qo_len", "token", "causal"),
    Mutation("right-window-lost", "params.window_right)", "0)", "right window"),
    Mutation("window-off-by-one", "params.window_left)", "params.window_left + 1)", "window"),
    Mutation("full-end-off-by-one", "full_end", "full_end + 1", "causal edges"),
    Mutation("full-begin-off-by-one", "key <", "key + 1 <", "window edges"),
    Mutation("union-for-intersection", "full_begin, a.end", "begin, b.end", "causal"),
    Mutation(
        "last-split-tile-lost",
        "(product + count) / work.num_splits",
        "product / work.num_splits + count / work.num_splits",
        "split decode",
    ),
    # Custom masks.
    Mutation("mask-bits-of-another-key", "(2 * (lane & 3))", "(lane & 3)", "mask"),
    Mutation("mask-rows-start-on-bytes", "+ static_cast<uint32_t>(bit & 7)", "", "mask"),
    Mutation("mixed-tile-counts-as-full", "visible != kAll", "visible == 0", "mask"),
    Mutation("empty-tile-walk-too-far", "32 - index", "33 - index", "sparse mask"),
    Mutation("mask-row-of-token", "row * params", "static_cast<int64_t>(token) * params", "verify"),
    Mutation("row-mask-begins-late", "request.qo_len", "request.qo_len + 1", "verify"),
    Mutation(
        "keys-ahead-of-mask-hidden",
        "low_bits(ahead - 32 * i)",
        "ahead > 32 * i + 31 ? ~0u : 0u",
        "verify",
    ),
    Mutation("first-masked-tile-unmasked", "first_key + kKeys >", "first_key >=", "verify"),
    Mutation("tiles-ahead-of-mask-skipped", "return tile", "return first", "verify many"),
    Mutation("mask-map-one-tile-late", "kTileKV)", "kTileKV + 1)", "verify many"),
    Mutation("key-share-counts-others", "periods * run()", "periods * period()", "key share"),
    Mutation("key-share-starts-at-zero", "+ first()", "", "key share of drafts"),
    Mutation("key-share-rows-by-own-keys", "whole_len()", "kv_len", "key share"),
    Mutation(
        "key-share-bits-of-own-keys",
        "share.position(key + 32 * i + b) - begin",
        "key + 32 * i + b - first",
        "key share of drafts",
    ),
    Mutation("items-see-delimiter", "hidden.end - key", "hidden.end - 1 - key", "items"),
    Mutation("items-miss-prefix-end", "hidden.begin - key", "hidden.begin - 1 - key", "items"),
    # Cascades and mixed batches.
    Mutation("group-stays-in-first-tile", "row >= tile", "row > tile", "cascade"),
    Mutation(
        "level-state-of-another-head", "kv_head * tile.num_splits", "kv_head", "split cascade"
    ),
    Mutation(
        "level-states-from-first", "begin += count", "begin = count", "cascade of three levels"
    ),
    Mutation("absent-row-merged", "kNoToken)", "kNoToken - 1)", "cascade in a graph"),
    Mutation("absent-head-merged", "if (head >= num_heads) return;", "", "cascade"),
    Mutation("block-kind-by-tokens", "qo_len * params.group_size", "qo_len", "cascade"),
    Mutation("level-writes-output", "|| split_tile < 0", "", "cascade of few rows"),
    Mutation("level-positions-not-shifted", "- key_offset", "", "cascade of few rows"),
    Mutation("positions-in-order", "params.positions == nullptr", "true", "cascade of few rows"),
    # Merging states.
    Mutation("empty-state-counts", "is_empty ? Chunk{} : v[i]", "v[i]", "merge pairs"),
    Mutation("empty-state-weighs", "is_empty ? 0.0f :", "", "merge pairs"),
    Mutation("merged-sum-not-rescaled", "sum *= factor;", "", "merge states"),
    Mutation("merged-values-not-rescaled", "*= factor", "*= 1.0f", "merge states"),
    Mutation("later-states-lost", "while", "if", "merge states"),
    Mutation("lse-stays-base2", "* params.from_base2", "", "merge natural logarithms"),
    Mutation("lse-overwritten-early", _WARP_BARRIER, "", "merge in place"),
    Mutation("merge-mask-inverted", "!= 0", "== 0", "merge in place"),
    Mutation("lse-of-first-row", "state * of_s.m", "0", "merge segments"),
    Mutation("absent-state-read", "num_states;", "num_states + 1;", "merge bad offsets"),
    Mutation("merge-head-of-another-row", "2 * row", "row", "merge pairs"),
    Mutation("lanes-past-the-row", "head_dim;", "head_dim + 8;", "merge pairs"),
    Mutation(
        "long-row-chunks-left-out",
        "if constexpr (Config::kOneChunk) break;",
        "break;",
        "merge long rows",
    ),
    Mutation("second-state-is-first", "? i", "? 0", "merge two states"),
    # Plans on the device.
    Mutation("tiles-read-early", _BARRIER, "", "device plans"),
    Mutation("tile-rounds-overlap", _BARRIER, "", "many requests"),
    Mutation("buckets-read-early", _BARRIER, "", "many requests"),
    Mutation("bucket-requests-collide", "+ tiles_end[index]", "", "many requests"),
    Mutation("equal-requests-collide", "other < index", "false", "device plans"),
    Mutation("states-of-whole-tiles", "- (tile - split_tile)", "", "device plans"),
    Mutation(
        "splits-from-round",
        "- (shared.tile_end[tile] - shared.tile[tile].num_splits)",
        "",
        "device plans",
    ),
    # Tables of plans, and lists by them.
    Mutation("too-many-keys", "found.is_good && found.keys <= kMostLength", "true", "bad tables"),
    Mutation("longest-part-not-weighed", ", longest_part + params.block", ", 0.0", "tables"),
    Mutation("longest-are-planned", "|| found.keys > kMostKeys", "", "longest tables"),
    Mutation("merges-outgrow-their-room", "return;", "{}", "list without room"),
    Mutation("list-outgrows-its-room", "return;", "{}", "list without room"),
    Mutation(
        "ticket-not-written",
        "ptx::store_release_system(params.landing, params.ticket);",
        "",
        "tables",
    ),
    Mutation("end-counts-as-inside", "> x", ">= x", "device plans"),
    Mutation("spare-items-kept", "zeros", "chunks[i]", "device plans"),
    Mutation("counters-kept", "= 0", "+= 0", "device plans"),
    Mutation("spare-merges-kept", "= -1", "+= 0", "device plans"),
    Mutation(
        "rows-beyond-q",
        "params.num_rows) - request.q_start;",
        "0x7fffffff) - request.q_start; request.qo_len = qo_len; return request;",
        "absurd offsets",
    ),
    Mutation(
        "spare-row-of-last-request", "row < first || row >=", "row < first && row >=", "new keys"
    ),
    Mutation("absent-request-written", "begin < 0 ||", "begin < -9 ||", "new keys"),
    Mutation("key-past-the-table", "index >=", "index >= 9 +", "new keys"),
    Mutation("queries-rotated-alike", "moves ? token.index : 0", "token.index", "new keys"),
    Mutation(
        "keys-rotated-backwards", "is_low ? -y[e] : y[e]", "is_low ? y[e] : -y[e]", "new keys"
    ),
    Mutation("lengths-before-the-append", "begin + max_of<int64_t>(count, 0)", "begin", "new keys"),
    Mutation("first-key-beyond-keys", "request.kv_len", "0x7fffffff", "absurd offsets"),
    Mutation("share-without-its-rows", "unit < 0", "unit > 0", "shared plans"),
    Mutation("first-key-not-listed", "request.kv_begin", "0", "padded prefill"),
    Mutation("slopes-of-first-request", "place + head", "head", "slopes"),
    Mutation("scales-of-first-request", "request.mask_start", "0", "descales"),
    Mutation(
        "value-scales-of-first-request",
        "request.mask_start * params.steps.scale_v",
        "0",
        "descales",
    ),
    Mutation("key-steps-as-lengths", " - first", "", "device plans"),
    Mutation(
        "keys-beyond-k", "min_of(room, params.kv_room - request.kv_start)", "room", "absurd offsets"
    ),
    Mutation(
        "element-offsets-as-tokens",
        "format.unit == 1 ? offset : offset / format.unit",
        "offset",
        "device plans",
    ),
    Mutation(
        "tile-rows-as-power-of-two",
        "divide(qo_len * params.group_size + params.tile_q - 1, params.tile_q_magic, "
        "params.tile_q_shift)",
        "(qo_len * params.group_size + params.tile_q - 1) >> (31 - __builtin_clz(params.tile_q))",
        "device plans",
    ),
    Mutation("pad-lse-of-another-request", "request.q_start + token", "token", "padded lse"),
    Mutation("pad-lse-stays-base2", "* (1.0f / kLog2e)", "", "padded lse"),
)
