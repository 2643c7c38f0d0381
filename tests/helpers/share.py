"""How much of the long tests is run, for when each step of theirs is slow.

CUPYATTN_TEST_SHARE=0.1 leaves a tenth of their repetitions and of every block of random cases.
"""

from __future__ import annotations

import os


def some(count: int) -> int:
    """`count`, or the chosen share of it, and at least 1."""
    return max(1, round(count * float(os.environ.get("CUPYATTN_TEST_SHARE", "1"))))
