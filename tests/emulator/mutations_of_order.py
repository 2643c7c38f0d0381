"""Mistakes of order: barriers and waits that are missing, or not enough."""

from __future__ import annotations

from .mutation import DECODE, PREFILL, STATE, SYNC, Mutation

ORDER = (
    # --- barriers ---
    Mutation(
        "no barrier before a tile's keys are used",
        PREFILL,
        f"ptx::cp_async_wait_group<0>();\n    {SYNC}    if constexpr (kPaged) advance_pages",
        "ptx::cp_async_wait_group<0>();\n    if constexpr (kPaged) advance_pages",
        "prefill",
    ),
    Mutation(
        "no barrier before a tile's values are used",
        PREFILL,
        f"ptx::cp_async_wait_group<0>();\n      {SYNC}      next = advance(loop);",
        "ptx::cp_async_wait_group<0>();\n      next = advance(loop);",
        "prefill",
    ),
    Mutation(
        "no barrier between the row table and the copy of Q",
        PREFILL,
        f"{SYNC}    copy_query_rows",
        "copy_query_rows",
        "prefill",
    ),
    Mutation(
        "Q is overwritten by the output while it is read",
        PREFILL,
        "if constexpr (kStagesOutput) ptx::warp_sync();",
        "",
        "few rows of 128",
    ),
    Mutation(
        "staged output is read before it is written",
        PREFILL,
        "ptx::warp_sync();\n    constexpr int kChunks",
        "constexpr int kChunks",
        "prefill",
    ),
    Mutation(
        "no barrier after keys are rotated",
        PREFILL,
        f"[&](int row) {{ return first_key + row; }});\n      {SYNC}",
        "[&](int row) { return first_key + row; });\n",
        "rope in the block",
    ),
    Mutation(
        "no barrier after Q is permuted",
        PREFILL,
        f"(shared.q, shared.work.tile.num_rows, thread);\n      {SYNC}",
        "(shared.q, shared.work.tile.num_rows, thread);\n",
        "fp8",
    ),
    Mutation(
        "bad keys are read while they are found",
        PREFILL,
        f"shared.bad_keys, thread);\n    {SYNC}",
        "shared.bad_keys, thread);\n",
        "bad values",
    ),
    Mutation(
        "a warp does not wait for all its lanes' copies",
        DECODE,
        "ptx::cp_async_wait_group<kStages - 2>();\n      ptx::warp_sync();",
        "ptx::cp_async_wait_group<kStages - 2>();",
        "decode",
    ),
    Mutation(
        "states take the ring's place while others read it",
        DECODE,
        f"ptx::cp_async_wait_group<0>();\n    {SYNC}    WarpStates& states",
        "ptx::cp_async_wait_group<0>();\n    WarpStates& states",
        "decode",
    ),
    Mutation(
        "warps' states are merged before they are there",
        DECODE,
        f"{SYNC}\n    const bool leaves_state",
        "const bool leaves_state",
        "decode",
    ),
    Mutation(
        "the row offsets of pages are used before they are there",
        DECODE,
        "ptx::warp_sync();\n        k_rows",
        "k_rows",
        "paged decode",
    ),
    Mutation(
        "the flag of the last block is read while it is written",
        STATE,
        f"{SYNC}  const bool is_last",
        "const bool is_last",
        "split decode",
    ),
    Mutation(
        "half of a warp skips a barrier",
        PREFILL,
        f"ptx::cp_async_wait_group<0>();\n    {SYNC}    prepare_q();",
        "ptx::cp_async_wait_group<0>();\n    if (lane < 16) ptx::block_sync();\n    prepare_q();",
        "prefill",
    ),
    # --- waits for copies ---
    Mutation(
        "decode waits for one stage too few",
        DECODE,
        "ptx::cp_async_wait_group<kStages - 2>();\n      ptx::warp_sync();",
        "ptx::cp_async_wait_group<kStages - 1>();\n      ptx::warp_sync();",
        "decode",
    ),
    Mutation(
        "a stage is not committed",
        DECODE,
        "ptx::cp_async_commit();\n      if constexpr (kPaged) next_page",
        "if constexpr (kPaged) next_page",
        "decode",
    ),
    Mutation(
        "prefill does not wait for V",
        PREFILL,
        f"ptx::cp_async_wait_group<0>();\n      {SYNC}      next = advance(loop);",
        f"ptx::cp_async_wait_group<1>();\n      {SYNC}      next = advance(loop);",
        "prefill",
    ),
)
