"""The support matrix of the documents, from the code: what is refused, which kernel serves what,
and which call has which option."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cupyattn.core import device, dtypes
from cupyattn.core.problem import (
    LATENT_HEAD_DIMS,
    MAX_HEAD_DIM,
    WIDE_HEAD_DIMS,
    AttentionProblem,
)
from cupyattn.core.selection import SCORES, SelectProblem
from cupyattn.errors import CupyAttnError
from cupyattn.launch.attention.key_lists import serves
from cupyattn.launch.instances import OPTIONS, SHARED_BYTES, fields_of
from cupyattn.launch.ops.select import refusal
from cupyattn.launch.tiles.prefill_sm90 import HEAD_DIMS_OF_8_BITS
from cupyattn.launch.tiles.row_classes import LARGE, MAX_ROWS, ROW_CLASSES
from cupyattn.launch.tiles.select import tile_config

from . import doors

HOPPER, OTHER = "sm_90a", "sm_80"
CHIPS = {
    "sm_80": "A100, A30",
    "sm_86": "A10, A40, RTX 30",
    "sm_89": "L4, L40S, RTX 40",
    "sm_90a": "H100, H200, GH200",
    "sm_100a": "B200, GB200",
    "sm_120a": "RTX 50, RTX PRO Blackwell",
}
# When the GPU tests and benchmarks last ran on a card of the architecture.
RAN_ON = {HOPPER: "H100, H200: November 2026"}
_FAMILIES = {
    "Ampere": ("sm_80", "sm_86"),
    "Ada": ("sm_89",),
    "Hopper": ("sm_90a",),
    "Blackwell": ("sm_100a", "sm_120a"),
}
_REFUSED = "Orin (8.7), 8.8, B300 (10.3), DGX Spark (12.1), GPUs before Ampere"
_HALF = dtypes.bfloat16, dtypes.float16
_KEYS = (*_HALF, dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.float32)
_OUTPUTS = (*_HALF, dtypes.float32, dtypes.float8_e4m3fn, dtypes.float8_e5m2)
_HOPPER_KERNELS = "portable, `prefill_sm90`, `wide_sm90`, `wide_decode_sm90`"
# The head dims of the table of kernels, for all multiples of 8.
_NARROW = (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 128), (256, 256)
_DIMS = *_NARROW, (256, 512), (512, 512), (512, 256), (64, 512)
_HEAD = """# Support matrix

Made from the code by `python -m docs.tools`; a test holds it against the code.

H100s and H200s have been measured, and run the GPU tests. Nothing has run on a GPU of another
architecture, Blackwell's included: for those, kernels are compiled in the tests, without spills,
and the portable kernels run on the host, thread by thread.
"""


def page() -> str:
    """docs/support.md as it should be."""
    parts = [_HEAD, _architectures(), _dtypes(), _head_dims(), _kernels(), _options(), _lists()]
    return "\n".join([*parts, _doors()])


def gpus() -> str:
    """The README's table: what each family of GPUs runs, and where it has been run."""
    rows = []
    for family, archs in _FAMILIES.items():
        names = ", ".join(f"`{arch}`" for arch in archs)
        chips = ", ".join(CHIPS[arch] for arch in archs)
        ran = [RAN_ON[arch] for arch in archs if arch in RAN_ON]
        fast = "yes" if HOPPER in archs else "–"
        rows.append([f"{family}, {names}", chips, fast, "yes", ", ".join(ran) or "never"])
    rows.append(["others", _REFUSED, "refused", "refused", "–"])
    head = "architecture", "GPUs, among others", "fast kernels", "portable kernels"
    return table([*head, "has run on hardware"], rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _architectures() -> str:
    rows = []
    for arch in device.ARCHS:
        kernels = "portable" if arch != HOPPER else _HOPPER_KERNELS
        nvrtc = "12.8" if arch in ("sm_100a", "sm_120a") else "12"
        shared = f"{SHARED_BYTES[arch] >> 10} KiB"
        rows.append([f"`{arch}`", CHIPS[arch], kernels, nvrtc, shared])
    head = "architecture", "GPUs, among others", "kernels", "NVRTC from", "shared memory of a block"
    older = "Older GPUs, 8.7, 8.8, 10.3 and 12.1 are refused with `UnsupportedError`.\n"
    return "## Architectures\n\n" + table(head, rows) + "\n" + older


def _dtypes() -> str:
    def answer(q: dtypes.DType, kv: dtypes.DType) -> str:
        problem = AttentionProblem(q, kv, q.of_output, 128, 128)
        if not _is_refused(problem):
            return "GPU, CPU"
        return "–" if _is_refused(problem, on_cpu=True) else "CPU"

    queries = (*_HALF, dtypes.float32, dtypes.float8_e4m3fn, dtypes.int8)
    rows = [[f"`{q}`", *(answer(q, kv) for kv in _KEYS)] for q in queries]
    outputs = ", ".join(
        f"`{o}`" for o in _OUTPUTS if not _is_refused(AttentionProblem(*_HALF[:1] * 2, o, 64, 64))
    )
    head = ["q", *(f"k, v `{kv}`" for kv in _KEYS)]
    said = (
        "Beside `int8` queries keys are `int8`, and values `float8_e4m3fn`. Queries of 8 bits are "
        "multiplied as they are where a kernel does ([8 bits](prefill_sm90.md#8-bits)), and in "
        "float16, into which they are widened ahead, elsewhere.\n\n"
    )
    said += f"Answers, in the calls with *output dtype* [below](#options-by-call): {outputs}.\n"
    return "## Dtypes\n\n" + table(head, rows) + "\n" + said


def _head_dims() -> str:
    wide = f"q·k a multiple of 64 up to {max(WIDE_HEAD_DIMS)[0]}, v 512 or 256"
    latent = ", ".join(f"{a} + {b}" for a, b in LATENT_HEAD_DIMS)
    bytes_as_they_are = ", ".join(
        str(a) if a == b else f"{a} / {b}" for a, b in HEAD_DIMS_OF_8_BITS
    )
    rows = (
        ("q·k and v", f"any two multiples of 8 from 8 to {MAX_HEAD_DIM}"),
        ("with RoPE inside attention", "q·k a multiple of 16; wide over keys of 16 bits"),
        ("8-bit q, multiplied as it is, q·k / v", bytes_as_they_are),
        ("wide, q·k / v", wide),
        ("latent + rope columns", latent),
        ("query heads to key heads", "any ratio"),
        ("page size", "any"),
    )
    return "## Head dims\n\n" + table(("what", "supported"), rows)


def _kernels() -> str:
    """Kernels by head dims and rows, on Hopper and elsewhere."""
    names = [f"≤ {MAX_ROWS[c]}" if c in MAX_ROWS else "more" for c in ROW_CLASSES]
    head = ["head dims", *(f"{n} rows" for n in names[:-1]), "more, Hopper", "more, others"]
    rows = []
    for dims in (*_DIMS, "latent"):
        problem = _problem(dims)
        kinds = [_kernel(problem, c, HOPPER) for c in ROW_CLASSES]
        rows.append([_name(dims), *kinds, _kernel(problem, LARGE, OTHER)])
    text = (
        "Rows are packed rows: query tokens of a request times query heads of a key head. bfloat16 "
        "over pages of 16, or of\n64 for latent attention. Wide kernels of other architectures are "
        "`wide_sm80`. A plan may\nchoose `prefill_sm90` for 17 to 64 rows over pages and for short "
        "requests beside long ones, and `prefill_sm80` for\n17 to 32 rows elsewhere.\n"
    )
    return "## Which kernel\n\n" + text + "\n" + table(head, rows)


def _options() -> str:
    """What long prompts run on Hopper, with each option."""
    forms = (
        ("ragged", dtypes.bfloat16, 0),
        ("pages of 16", dtypes.bfloat16, 16),
        ("pages of 1", dtypes.bfloat16, 1),
        ("fp8, pages of 16", dtypes.float8_e4m3fn, 16),
        ("fp8, pages of 1", dtypes.float8_e4m3fn, 1),
    )
    names = [x for x in OPTIONS if x != "draft_mask"]
    rows = []
    for name in names:
        cells = []
        for _, kv, page_size in forms:
            slow = [d for d in _NARROW if not _is_fast(name, d, kv, page_size)]
            cells.append(_all_but(slow))
        rows.append([name.replace("_", " "), *cells])
    text = (
        "Head dims of the table above, up to 256, for which Hopper's fast kernel of prompts (more "
        "than 64 packed rows) supports\nan option. Other cases, and tensors that are not aligned "
        "to 16 bytes, use the portable kernels: slower, same results.\n"
    )
    return (
        "## Options on Hopper\n\n" + text + "\n" + table(["option", *(f[0] for f in forms)], rows)
    )


def _lists() -> str:
    """What attention by lists of keys, and the selection of such lists, have kernels for."""
    q, e4m3 = dtypes.bfloat16, dtypes.float8_e4m3fn
    narrow = AttentionProblem(q, q, q, 128, 128, paged=True, sparse=True)
    served = {
        "16-bit keys": narrow,
        "fp8 keys": replace(narrow, dtype_kv=e4m3),
        "soft cap": replace(narrow, soft_cap=True),
        "output gate": replace(narrow, **fields_of(["output_gate"])),
        "head dims beyond 256": replace(narrow, head_dim_qk=512, head_dim_vo=512),
    }
    attended = [[name, "GPU, CPU" if serves(x) else "CPU"] for name, x in served.items()]
    forms = (("16 bits", q, ""), ("e4m3", e4m3, ""), ("e4m3 in DeepGEMM's pages", e4m3, "pages"))
    selected = []
    for name in (*SCORES, "max of candidates"):
        answers = []
        for _, dtype, scales in forms:
            problem = _selection(name.partition(" ")[0], dtype, scales, " of " in name)
            answers.append("GPU, CPU" if refusal(problem) is None else "CPU")
        selected.append([f"`{name}`" if name in SCORES else name, *answers])
    text = (
        "[`sparse.attend`](concepts/lists.md), by lists of all heads, KV heads or query heads, "
        "with any page size, windows,\nsinks and an LSE:\n\n"
    )
    other = "\n`sparse.select` by score, of queries of 16 bits, or e4m3 beside e4m3 rows:\n\n"
    head = "index rows", *(name for name, *_ in forms)
    return (
        "## Lists of keys\n\n"
        + text
        + table(("what", "served on"), attended)
        + other
        + table(head, selected)
    )


def _selection(
    score: str, dtype: dtypes.DType, row_scales: str, has_candidates: bool
) -> SelectProblem:
    """16 blocks of 128 keys by four index heads of 128 columns; sums take them together."""
    return SelectProblem(
        dtype_q=dtypes.bfloat16,
        dtype_k=dtype,
        row_scales=row_scales,
        head_dim=128,
        num_heads=4,
        num_groups=4 if score == "max" else 1,
        score=score,
        block=128,
        topk=16,
        last=1,
        candidate_block=128 if has_candidates else 0,
    )


def _all_but(slow: list[tuple[int, int]]) -> str:
    if len(slow) == len(_NARROW):
        return "–"
    return "all but " + ", ".join(map(_name, slow)) if slow else "all"


def _doors() -> str:
    found = [(door.name, set(doors.options_of(door))) for door in doors.doors()]
    rows = [
        [f"`{name}`", *("✓" if option in has else "" for option in doors.OPTIONS)]
        for name, has in found
    ]
    text = (
        "✓: the call takes the option and answers differently for it, tried on CPU arrays. Masks\n"
        "of decodes are those of draft tokens. [CUDA graphs](howto/cuda_graphs.md) can capture\n"
        "each of them. Latent attention: [its page](mla.md).\n"
    )
    return "## Options by call\n\n" + text + "\n" + table(["call", *doors.OPTIONS], rows)


def _is_refused(problem: AttentionProblem, on_cpu: bool = False) -> bool:
    try:
        problem.check_supported(on_cpu)
    except CupyAttnError:
        return True
    return False


def _problem(dims: tuple[int, int] | str) -> AttentionProblem:
    q = dtypes.bfloat16
    if dims == "latent":
        return AttentionProblem(q, q, q, 576, 512, paged=True, latent=True)
    return AttentionProblem(q, q, q, *dims, paged=True)  # type: ignore[misc]


def _kernel(problem: AttentionProblem, rows: str, arch: str) -> str:
    page_size = 64 if problem.latent else 16
    return f"`{tile_config(problem, rows, SHARED_BYTES[arch], True, arch, page_size).name}`"


def _is_fast(option: str, dims: tuple[int, int], kv: dtypes.DType, page_size: int) -> bool:
    q = dtypes.bfloat16
    fields = fields_of([option])
    problem = AttentionProblem(q, kv, q, *dims, paged=page_size > 0, **fields)
    tiles = tile_config(problem, LARGE, SHARED_BYTES[HOPPER], True, HOPPER, page_size)
    return tiles.is_sm90


def _name(dims: tuple[int, int] | str) -> str:
    if isinstance(dims, str):
        return "latent, 576/512"
    return str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
