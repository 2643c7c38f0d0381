"""SGLang's own unit tests of attention backends, which are in its wheel, over ours:
`python -m helpers.engines.sglang_kit '{"device": "cpu"}'`.

Its cases, modules, pools and reference. The last line that is printed is JSON: "passed", or the
error, by case. Layouts are those that its allocators make; "non_monotonic_extend" scatters tokens
within a page, which no table of pages can say.
"""

from __future__ import annotations

import json
import sys
import unittest
from typing import Any

LAYOUTS = ("shuffled_pages", "contiguous", "interleaved_pages")


def main(given: dict[str, Any]) -> dict[str, str]:
    from helpers.engines import absent, sglang_program

    device = given.get("device", "cpu")
    absent.install(*sglang_program.ABSENT)
    sglang_program.stand_in(device)
    sglang_program.natively()
    import torch
    from sglang.srt.plugins import load_plugins
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit

    load_plugins()
    torch.set_grad_enabled(False)
    if device == "cpu":
        torch.cuda.manual_seed_all = lambda *_: None
    # Which keys a window has in a step of decoding: as with FlashInfer's and FlashAttention's.
    kit._SWA_DECODE_EXTEND_WINDOW = frozenset({*kit._SWA_DECODE_EXTEND_WINDOW, "cupyattn"})
    dense = kit.make_dense_cases("cupyattn")
    windows = [
        *kit.make_swa_no_prefix_input_config_cases("cupyattn"),
        *kit.make_swa_prefix_input_config_cases("cupyattn"),
    ]
    found: dict[str, str] = {}

    def run(case: Any, more: str = "", **named: Any) -> None:
        name = " ".join([case.name, more, *map(str, named.values())])
        try:
            kit.run_dense_attention_case(unittest.TestCase(), case, device=device, **named)
            found[name] = "passed"
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}".partition("\n")[0]

    for case in dense:
        for layout in LAYOUTS:
            run(case, loc_layout=layout)
        run(case, dtype=torch.bfloat16)
    for case in windows:
        run(case, "refused")
    init = kit.MockModelRunner.__init__

    def one_pool(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.is_hybrid_swa = False  # --disable-hybrid-swa-memory

    kit.MockModelRunner.__init__ = one_pool
    for case in windows:
        for layout in LAYOUTS:
            run(case, loc_layout=layout)
        run(case, dtype=torch.bfloat16)
    if device != "cpu":
        _graphs(kit, dense, found)
    return found


def _graphs(kit: Any, cases: Any, found: dict[str, str]) -> None:
    """Its decodes in CUDA graphs: captured at one batch, replayed at another."""
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graphs

    for case in cases:
        if case.forward_mode.is_decode():
            for more in (0, 2):
                try:
                    graphs.run_dense_cuda_graph_decode_case(
                        unittest.TestCase(),
                        case,
                        cuda_graph_capture_batch_size=case.batch_size + more,
                    )
                    found[f"{case.name} graph {more}"] = "passed"
                except BaseException as error:
                    found[f"{case.name} graph {more}"] = f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
