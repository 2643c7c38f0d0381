"""One merge as data, with its exact traffic, and the list of those that are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MergeCase:
    """States [num_rows, num_states, num_heads, head_dim], bfloat16, become one a row.

    `api` "pair" has two states in arrays of their own (merge_state), "states" all in one
    (merge_states). For host cases `framework` and `out` say whose arrays ours is called with, and
    whether it gets `out=` and `lse=`.
    """

    name: str
    op: str
    api: str
    num_rows: int
    num_states: int = 2
    num_heads: int = 32
    head_dim: int = 128
    framework: str = "torch"
    out: bool = False
    mask: str = "none"
    goals: tuple[tuple[str, float], ...] = ()
    host_goal_us: float | None = None

    @property
    def is_host(self) -> bool:
        """Whether the host's part of a call is timed, and not the device's."""
        return self.op == "host_merge"

    @property
    def pairs(self) -> int:
        """(row, state) pairs of one head."""
        return self.num_rows * self.num_states

    @property
    def flops(self) -> int:
        """A product and a sum an element."""
        return 2 * self.pairs * self.num_heads * self.head_dim

    @property
    def quoted_flops(self) -> int:
        return self.flops

    @property
    def bytes(self) -> int:
        """Each state and its LSE read once, the answer written once."""
        states = self.num_rows * self.num_heads * (self.num_states + 1)
        return states * (2 * self.head_dim + 4)

    def floor_us(self, tflops: float, gbps: float) -> float:
        """No kernel is faster than this on a device of these two measured ceilings."""
        return max(self.flops / tflops / 1e6, self.bytes / gbps / 1e3)


def _case(name: str, api: str, num_rows: int, num_states: int, factor: float = 0.0) -> MergeCase:
    goals = (("flashinfer_fa2", factor),) if factor else ()
    return MergeCase(f"merge_{name}", "merge", api, num_rows, num_states, goals=goals)


def _host(api: str, framework: str, out: bool, goal: float | None = None) -> MergeCase:
    name = f"host_merge_{api}_{framework}_{'out' if out else 'alloc'}"
    return MergeCase(name, "host_merge", api, 8, framework=framework, out=out, host_goal_us=goal)


MERGE_CASES = (
    _case("n4096_pair", "pair", 4096, 2, 1.05),
    _case("n512_states16", "states", 512, 16, 1.05),
    _case("n4096_states2", "states", 4096, 2),
    _case("n512_pair", "pair", 512, 2),
    _host("pair", "torch", False, 6.0),
    _host("pair", "torch", True, 6.0),
    _host("states", "torch", False, 6.0),
    _host("pair", "cupy", False),
    _host("pair", "cupy", True),
)
