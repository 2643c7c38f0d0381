"""Mistakes of visibility: which keys a row sees, by causality, windows and masks of every form."""

from __future__ import annotations

from .mutation import DECODE, MASK, WORK, Mutation

VISIBILITY = (
    # --- which keys a row sees ---
    Mutation(
        "causality off by one",
        MASK,
        "min_of(request.kv_len, position + 1)",
        "min_of(request.kv_len, position)",
        "causal",
    ),
    Mutation(
        "causality aligned to the top left",
        WORK,
        "return token + kv_len - qo_len;",
        "return token;",
        "causal",
    ),
    Mutation(
        "window off by one",
        MASK,
        "position - params.window_left)",
        "position - params.window_left + 1)",
        "window",
    ),
    Mutation(
        "a tile one key past the last full one is not masked",
        MASK,
        "key + count > full_end",
        "key + count > full_end + 1",
        "causal edges",
    ),
    Mutation(
        "a tile one key before the first full one is not masked",
        MASK,
        "key < full_begin",
        "key + 1 < full_begin",
        "window edges",
    ),
    Mutation(
        "the union of limits for their intersection",
        MASK,
        "KeyRange{a.begin, b.end, b.begin, a.end",
        "KeyRange{a.begin, b.end, a.begin, b.end",
        "causal",
    ),
    Mutation(
        "the last tiles of a split are lost",
        MASK,
        "(product + count) / work.num_splits",
        "product / work.num_splits + count / work.num_splits",
        "split decode",
    ),
    Mutation(
        "mask bits of another key",
        MASK,
        "first_key) >> (2 * (lane & 3));",
        "first_key) >> (lane & 3);",
        "mask",
    ),
    Mutation(
        "mask rows start on bytes",
        MASK,
        "+ static_cast<uint32_t>(bit & 7)",
        "",
        "mask",
    ),
    Mutation(
        "tiles that hide some keys count as full",
        MASK,
        "if (visible != kAll)",
        "if (visible == 0)",
        "mask",
    ),
    Mutation(
        "the walk over empty tiles leaves some out",
        MASK,
        "tile += 32 - index % 32;",
        "tile += 33 - index % 32;",
        "sparse mask",
    ),
    # --- masks over draft tokens, multi-item scoring ---
    Mutation(
        "rows of a mask count from the request on",
        MASK,
        "return 8 * row * params.mask_row_bytes",
        "return 8 * static_cast<int64_t>(token) * params.mask_row_bytes",
        "verify",
    ),
    Mutation(
        "a mask of rows begins one key late",
        MASK,
        "return request.kv_len - request.qo_len;",
        "return request.kv_len - request.qo_len + 1;",
        "verify",
    ),
    Mutation(
        "keys ahead of a mask take the bits before its row",
        MASK,
        "bits[i] |= low_bits(ahead - 32 * i);",
        "bits[i] |= ahead > 32 * i + 31 ? ~0u : 0u;",
        "verify",
    ),
    Mutation(
        "tiles that a mask begins in are not masked",
        DECODE,
        "is_partial = first_key + kKeys > Mask::first_key(request);",
        "is_partial = first_key >= Mask::first_key(request);",
        "verify",
    ),
    Mutation(
        "tiles ahead of a mask are skipped",
        MASK,
        "if (tile < first) return tile;",
        "if (tile < first) return first;",
        "verify many",
    ),
    Mutation(
        "tiles ahead of a mask count as the first that it reaches",
        MASK,
        "max_of(span.begin, ahead / kTileKV)",
        "max_of(span.begin, ahead / kTileKV + 1)",
        "verify many",
    ),
    Mutation(
        "rows of bools do not start on bytes",
        "entry/packbits.cu",
        "first = segment * length + 8 * (index - segment * bytes);",
        "first = 8 * index;",
        "verify",
    ),
    Mutation(
        "items see their delimiter",
        MASK,
        "~low_bits(run.start - key - 32 * i)",
        "~low_bits(run.start - 1 - key - 32 * i)",
        "items",
    ),
    Mutation(
        "items miss the end of the prefix",
        MASK,
        "low_bits(run.prefix - key - 32 * i) |",
        "low_bits(run.prefix - 1 - key - 32 * i) |",
        "items",
    ),
)
