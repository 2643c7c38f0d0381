"""What compiling costs: averages over kernels of level "standard", to estimate jobs by."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """CPU seconds of a compile and bytes of its cubin."""

    seconds: float
    bytes: float


# By NVRTC 13.0 on one core of a server, up to eight kernels each. Slow cores take four times as
# long. Architectures without rows of their own cost what sm_80 does.
_KIB = 1024
_COSTS = {
    "append_new_kv": Cost(0.10, 16 * _KIB),
    "append_paged_kv_cache": Cost(0.08, 14 * _KIB),
    "copy_rows": Cost(0.06, 9 * _KIB),
    "decode_sm80": Cost(0.76, 97 * _KIB),
    "exchange_states": Cost(0.4, 16 * _KIB),
    "gather_keys": Cost(0.06, 8 * _KIB),
    "get_batch_indices_positions": Cost(0.03, 5 * _KIB),
    "get_seq_lens": Cost(0.02, 4 * _KIB),
    "list_slots": Cost(0.04, 7 * _KIB),
    "merge_levels": Cost(0.11, 19 * _KIB),
    "merge_splits": Cost(0.09, 15 * _KIB),
    "merge_states": Cost(0.06, 10 * _KIB),
    "mixed_sm80": Cost(2.1, 184 * _KIB),
    "packbits": Cost(0.05, 13 * _KIB),
    "pad_lse": Cost(0.05, 12 * _KIB),
    "plan_batch": Cost(0.17, 27 * _KIB),
    "prefill_sm80": Cost(1.1, 127 * _KIB),
    "serving_metadata": Cost(1.2, 70 * _KIB),
    "share_indices": Cost(0.05, 7 * _KIB),
    "widen_rows": Cost(0.04, 8 * _KIB),
    "store_kv": Cost(0.09, 16 * _KIB),
    "wide_sm80": Cost(0.5, 88 * _KIB),
}
_BY_ARCH = {
    "sm_90a": {
        "decode_sm80": Cost(0.69, 90 * _KIB),
        "mixed_sm80": Cost(1.6, 161 * _KIB),
        "prefill_sm80": Cost(0.90, 96 * _KIB),
        "prefill_sm90": Cost(1.9, 154 * _KIB),
        "wide_decode_sm90": Cost(0.45, 81 * _KIB),
        "wide_sm90": Cost(1.5, 137 * _KIB),
    }
}
_UNKNOWN = Cost(0.1, 16 * _KIB)


def cost(name: str, arch: str) -> Cost:
    """The estimate for one kernel called `name`."""
    return _BY_ARCH.get(arch, {}).get(name) or _COSTS.get(name, _UNKNOWN)
