"""How long an engine's work takes, and which kernels it launches."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Kernels that are no attention: torch's own, products of matrices, and copies.
_OTHERS = ("at::", "cublas", "nvjet", "cutlass", "gemm", "Gemm", "Memcpy", "Memset", "cub::")


def measured(work: Callable[[], Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What `work()` gives, and how many seconds each of its rounds took. On a GPU also which
    kernels one more round launched, replays of CUDA graphs included. `lock` names a file that
    programs hold in turn; beside it each leaves one of its own once all is compiled."""
    if "lock" not in options:
        return _measured(work, options)
    work()
    Path(f"{options['lock']}.{os.getpid()}").touch()
    with Path(options["lock"]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _measured(work, options)


def _measured(work: Callable[[], Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    is_gpu = options["device"] != "cpu"
    seconds, answer = [], None
    for _ in range(options.get("rounds", 1)):
        start = time.perf_counter()
        answer = work()
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    said: dict[str, Any] = {"seconds": seconds}
    if is_gpu:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            work()
            torch.cuda.synchronize()
        names = (x.name for x in profile.events() if x.device_type.name == "CUDA")
        found = Counter(x for x in names if not any(y in x for y in _OTHERS))
        said["kernels"] = {name[:80]: count for name, count in found.most_common(24)}
    return answer, said
