"""The kernels in builds for AddressSanitizer and UndefinedBehaviorSanitizer, the compiler's own."""

from __future__ import annotations

import re

import pytest
from helpers import gpu_cases

from . import sanitized

# Where memory is found, and what is computed. The slow suite has all, and the `checked` builds of
# other tests see nearly all that these do.
NAMES = {
    "asan": ("unaligned, append",),
    "ubsan": ("e4m3 cache, rope, one row",),
}
MISTAKES = {
    "asan": {
        "past_the_array": "use-after-poison|heap-buffer-overflow",
        "before_the_array": "use-after-poison|heap-buffer-overflow",
        "writes_past_the_array": "use-after-poison|heap-buffer-overflow",
        "index_past_a_local_array": "stack-buffer-overflow",
    },
    "ubsan": {
        "shift_too_far": "shift exponent",
        "overflowing_sum": "signed integer overflow",
        "index_past_a_local_array": "out of bounds",
        "misaligned_global_vector": "misaligned address",
    },
}


@pytest.mark.parametrize("mode", MISTAKES)
def test_cases_are_clean(mode: str) -> None:
    done = sanitized.run(mode, *NAMES[mode], "mistakes/fine_exchange", "mistakes/fine_copy")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("passed") == len(NAMES[mode]) + 2


@pytest.mark.parametrize("mode", MISTAKES)
def test_mistakes_are_found(mode: str) -> None:
    *found, fine = sanitized.run_each(
        mode, *(f"mistakes/{name}" for name in (*MISTAKES[mode], "fine_copy"))
    )
    assert fine.status == 0, fine.text
    for (name, message), done in zip(MISTAKES[mode].items(), found, strict=True):
        assert done.status != 0 and re.search(message, done.text), f"{name}: {done.text[-3000:]}"
        assert "mistakes.cu" in done.text, done.text[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MISTAKES)
def test_every_case_is_clean(mode: str) -> None:
    names = [name for name in gpu_cases.ALONE if not name.endswith("append")]
    done = sanitized.run(mode, *names)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
