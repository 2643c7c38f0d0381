"""Mistakes where tokens have lists of their keys."""

from __future__ import annotations

from .mutation import Mutation

LISTS = (
    Mutation(
        "entries-beyond-the-request",
        "static_cast<uint32_t>(num_blocks)",
        "0x80000000u",
        "lists of blocks",
    ),
    Mutation("last-block-not-cut", "key < listed_end", "key >= 0", "lists of blocks"),
    Mutation(
        "window-keys-twice", "max_of(end - lists.window, 0), end", "end, end", "lists, window"
    ),
    Mutation("drafts-see-the-future", "at.rest - 1", "0", "lists of blocks"),
    Mutation(
        "padded-tokens-attend",
        "max_of(lists.qo_offsets[first + 1] - token, 0)",
        "1",
        "lists of nobody",
    ),
    Mutation("listed-offsets-read-early", "ptx::warp_sync();", "", "lists of blocks"),
    Mutation(
        "absent-listed-keys-attend",
        "s[m][n][e] = Form::hidden()",
        "s[m][n][e] += 0.0f",
        "lists of blocks",
    ),
)
