"""Mistakes of the planner on the device, and of what else reads lengths there."""

from __future__ import annotations

from .mutation import Mutation

_PLAN = "cupyattn/schedule/plan_batch.cuh"
_REQUEST = "cupyattn/schedule/planned_request.cuh"
_PAD = "entry/pad_lse.cu"
_HOPPER = "cupyattn/attention/prefill_sm90.cuh"

PLANS = (
    Mutation(
        "no barrier between tiles and the items they become",
        _PLAN,
        "ptx::block_sync();\n      spread(",
        "spread(",
        "device plans",
    ),
    Mutation(
        "no barrier between two rounds of tiles",
        _PLAN,
        "items += total & kSplitsMask;\n      ptx::block_sync();",
        "items += total & kSplitsMask;",
        "many requests",
    ),
    Mutation(
        "no barrier between counting and adding up buckets",
        _PLAN,
        "shared.bucket[thread] = start;\n    ptx::block_sync();",
        "shared.bucket[thread] = start;",
        "device plans",
    ),
    Mutation(
        "requests of a bucket in one place",
        _PLAN,
        "order[static_cast<int>(shared.bucket[bucket]) + tiles_end[index]] = index;",
        "order[static_cast<int>(shared.bucket[bucket])] = index;",
        "many requests",
    ),
    Mutation(
        "states of whole tiles are counted too",
        _PLAN,
        "items + start - (tile - split_tile)",
        "items + start",
        "device plans",
    ),
    Mutation(
        "splits counted from the first item of a round",
        _PLAN,
        "item - (shared.tile_end[tile] - shared.tile[tile].num_splits)",
        "item",
        "device plans",
    ),
    Mutation(
        "an end counts as inside", _PLAN, "ends[middle] > x", "ends[middle] >= x", "device plans"
    ),
    Mutation(
        "spare items are left as they are",
        _PLAN,
        "chunks[i] = zeros;",
        "chunks[i] = i < kChunks * items ? zeros : chunks[i];",
        "device plans",
    ),
    Mutation(
        "counters are left as they are",
        _PLAN,
        "params.counters[i] = 0;",
        "params.counters[i] += 0;",
        "device plans",
    ),
    Mutation(
        "spare merges are left as they are",
        _PLAN,
        "params.merges[i] = -1;",
        "params.merges[i] += 0;",
        "device plans",
    ),
    Mutation(
        "rows beyond q",
        _REQUEST,
        "qo_len = clamp(end, params.num_rows) - request.q_start;",
        "qo_len = clamp(end, 0x7fffffff) - request.q_start;\n        request.qo_len = qo_len;\n"
        "        return request;",
        "absurd offsets",
    ),
    Mutation(
        "keys beyond k",
        _REQUEST,
        "room -= request.kv_start;",
        "",
        "absurd offsets",
    ),
    Mutation(
        "offsets in elements taken for tokens",
        _REQUEST,
        "return format.unit == 1 ? offset : offset / format.unit;",
        "return offset;",
        "device plans",
    ),
    Mutation(
        "spare items are worked on",
        _HOPPER,
        "if (item.work.tile.num_rows <= 0) return item;",
        "",
        "hopper device plans",
    ),
    Mutation(
        "tiles of a power of two of rows",
        _REQUEST,
        "divide(qo_len * params.group_size + params.tile_q - 1, params.tile_q_magic,\n"
        "                  params.tile_q_shift)",
        "(qo_len * params.group_size + params.tile_q - 1) >> (31 - __builtin_clz(params.tile_q))",
        "device plans",
    ),
    Mutation("LSE of another request", _PAD, "request.q_start + token", "token", "padded lse"),
    Mutation("LSE in base 2", _PAD, " * (1.0f / kLog2e)", "", "padded lse"),
)
