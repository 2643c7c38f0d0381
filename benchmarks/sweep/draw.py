"""Draws of cases: pure functions of a seed and a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..batch.case import BatchCase
from ..lists.case import ListCase
from ..selections.case import SelectionCase
from .groups import BY_NAME, GROUPS
from .models import MODELS, TENSOR_PARALLEL, Model

_LISTING = (ListCase, SelectionCase)
_PAGE_SIZES = (1, 16, 16, 16, 32, 64, 128)
_LONGEST_PROMPT = 32768
_MOST_KEYS = 131072  # of one request
_MAX_KV_BYTES = 3 << 30  # of a case: the pool is random numbers, made anew for each case
_MAX_FLOPS = 6e12  # of a case: some 10 ms
_CHECKED = 12  # requests of a case
_WEIGHTS = {"decode": 8, "verify": 3, "prompt": 6, "append": 2, "mixed": 3} | {
    name: 1 for name in GROUPS if name not in BY_NAME
}
_SAME_LENGTH = 0.35  # of batches

Draw = Callable[[random.Random, Model], BatchCase]


def draw_cases(seed: int, count: int, groups: Sequence[str] = ()) -> list[BatchCase]:
    """The first `count` cases of a seed, of all schedules or of these in turn. A longer draw
    begins with a shorter one."""
    return [
        draw_case(seed, number, groups[number % len(groups)] if groups else None)
        for number in range(count)
    ]


def draw_case(seed: int, number: int, schedule: str | None = None) -> BatchCase:
    """One case: a model's shard, a schedule, the drawn one or this, and its lengths. The name says
    what they are."""
    generator = random.Random(f"{seed}/{number}")
    drawn = generator.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    schedule = schedule or drawn
    if schedule in GROUPS:
        case = _fit(GROUPS[schedule].draw(generator))
        label = _lengths_label(case)
    else:
        model, parallel = _shard(generator, schedule)
        case = _fit(_SCHEDULES[schedule](generator, model))
        label = f"{model.name}_tp{parallel}"
    window = f"_w{case.window_left + 1}" if case.window_left >= 0 else ""
    full = "_full" if case.is_8bit and not case.causal else ""
    heads = f"{case.num_qo_heads}h{case.num_kv_heads}"
    named = f"{schedule}_{label}_{heads}_d{case.head_dim_qk}{full}{window}_b{case.batch}"
    return replace(case, name=f"s{seed}_{number:03d}_{named}")


def _lengths_label(case: BatchCase) -> str:
    """Rows and keys of the longest request, and the page size; "to" where lengths differ. Of lists
    what they say."""
    if isinstance(case, _LISTING):
        return case.label
    q_len, kv_len = max(case.q_lens), max(case.kv_lens)
    keys = f"{'' if len(set(case.kv_lens)) == 1 else 'to'}{kv_len}"
    return f"q{q_len}_k{keys}" + (f"_p{case.page_size}" if case.page_size else "")


def schedule_of(case: BatchCase) -> str:
    """The schedule in the name of a drawn case."""
    return case.name.split("_")[2]


def model_of(case: BatchCase) -> str:
    """The model in the name of a drawn case, or of lists the kind; groups stand for one."""
    if isinstance(case, _LISTING):
        return case.kind
    if schedule_of(case) in GROUPS:
        return schedule_of(case)
    return "_".join(case.name.split("_")[3:]).partition("_tp")[0]


def _shard(generator: random.Random, schedule: str) -> tuple[Model, int]:
    fitting = [model for model in MODELS if schedule == "prompt" or not model.prompts_only]
    while True:
        parallel = generator.choice(TENSOR_PARALLEL)
        shard = generator.choice(fitting).shard(parallel)
        if shard is not None:
            return shard, parallel


def _case(
    generator: random.Random,
    model: Model,
    op: str,
    api: str,
    requests: tuple[tuple[int, int, int], ...],
    window: bool = True,
) -> BatchCase:
    """A case of these requests; dtypes, page size and window are drawn."""
    dtype = generator.choices(("bfloat16", "float16"), (3, 1))[0]
    kv_dtype = dtype
    page_size = generator.choice(_PAGE_SIZES) if api != "ragged" else 0
    # fp8 keys are for caches: nobody stores a fresh prompt's alone.
    if api != "ragged" and generator.random() < 0.15:
        dtype, kv_dtype = "bfloat16", "float8_e4m3fn"
    return BatchCase(
        "drawn",
        op,
        api,
        requests,
        page_size,
        model.num_qo_heads,
        model.num_kv_heads,
        model.head_dim,
        model.head_dim_vo or model.head_dim,
        causal=api != "decode" and not model.encoder,
        logits_soft_cap=model.soft_cap,
        window_left=generator.choice(model.windows) if window else -1,
        kv_dtype=kv_dtype,
        dtype=dtype,
        sinks=model.sinks,
        checked=_CHECKED,
    )


def _decode(generator: random.Random, model: Model) -> BatchCase:
    lengths = _key_lengths(generator, _log_uniform(generator, 1, 512))
    return _case(generator, model, "batch_decode", "decode", _grouped(1, lengths))


def _verify(generator: random.Random, model: Model) -> BatchCase:
    q_len = generator.randint(2, 8)
    lengths = _key_lengths(generator, _log_uniform(generator, 1, 128))
    requests = _grouped(q_len, [max(q_len, length) for length in lengths])
    return _case(generator, model, "verify", "verify", requests)


def _prompt(generator: random.Random, model: Model) -> BatchCase:
    batch = _log_uniform(generator, 1, 64)
    if model.encoder:
        rows = generator.choice((197, 448, 577, 1500))
        keys = 1500 if rows == 448 else rows  # a decoder's cross attention
        return _case(generator, model, "ragged", "ragged", ((batch, rows, keys),))
    lengths = _lengths(generator, batch, _log_uniform(generator, 16, _LONGEST_PROMPT))
    lengths = [min(length, _LONGEST_PROMPT) for length in lengths]
    requests = tuple((1, length, length) for length in lengths)
    # Sinks are for pages: no peer has them over ragged keys.
    op, api = ("append", "paged") if model.sinks else ("ragged", "ragged")
    return _case(generator, model, op, api, _merged(requests))


def _append(generator: random.Random, model: Model) -> BatchCase:
    """Prompts of which a part is cached."""
    requests = []
    for cached in _key_lengths(generator, _log_uniform(generator, 1, 16)):
        new = _log_uniform(generator, 16, 2048)
        requests.append((1, new, cached + new))
    return _case(generator, model, "append", "paged", _merged(tuple(requests)))


def _mixed(generator: random.Random, model: Model) -> BatchCase:
    """Chunks of a prompt beside decodes."""
    chunk = generator.choice((128, 256, 512, 1024, 2048))
    chunks = tuple(
        (1, chunk, chunk * generator.randint(1, 8)) for _ in range(generator.choice((1, 1, 2, 4)))
    )
    decodes = _grouped(1, _key_lengths(generator, _log_uniform(generator, 4, 256)))
    # The wrapper of mixed batches has no window, soft cap or sinks; the paged one has.
    plain = model.soft_cap == 0 and not model.sinks
    op, api = ("mixed", "mixed") if plain else ("append", "paged")
    return _case(generator, model, op, api, _merged(chunks) + decodes, window=not plain)


_SCHEDULES: dict[str, Draw] = {
    "decode": _decode,
    "verify": _verify,
    "prompt": _prompt,
    "append": _append,
    "mixed": _mixed,
}


def _log_uniform(generator: random.Random, minimum: int, maximum: int) -> int:
    return round(minimum * (maximum / minimum) ** generator.random())


def _key_lengths(generator: random.Random, count: int) -> list[int]:
    return _lengths(generator, count, _log_uniform(generator, 128, 32768))


def _lengths(generator: random.Random, count: int, median: int) -> list[int]:
    """Equal lengths, or log-normal ones around the median."""
    if generator.random() < _SAME_LENGTH:
        return [median] * count
    sigma = generator.uniform(0.3, 1.2)
    drawn = (round(median * generator.lognormvariate(0.0, sigma)) for _ in range(count))
    return [min(max(length, 1), _MOST_KEYS) for length in drawn]


def _grouped(q_len: int, kv_lens: list[int]) -> tuple[tuple[int, int, int], ...]:
    return _merged(tuple((1, q_len, kv_len) for kv_len in kv_lens))


def _merged(requests: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """The same requests in the same order, equal neighbours as one group."""
    merged: list[tuple[int, int, int]] = []
    for count, q_len, kv_len in requests:
        if merged and merged[-1][1:] == (q_len, kv_len):
            count += merged.pop()[0]
        merged.append((count, q_len, kv_len))
    return tuple(merged)


def _fit(case: BatchCase) -> BatchCase:
    """The case with as many of its requests as memory and time allow, at least the first. Lists are
    drawn so that they fit."""
    if isinstance(case, _LISTING):
        return case
    row = case.num_kv_heads * (case.head_dim_qk + case.head_dim_vo)
    row *= case.groups[0].kv_itemsize
    kept: list[tuple[int, int, int]] = []
    kv_bytes, flops = 0, 0
    for group in case.groups:
        one_bytes, one_flops = group.kv_len * row, group.flops // group.batch
        # A mixed batch keeps its decodes: chunks come first and never fill the room.
        room = (_MAX_KV_BYTES - kv_bytes) // one_bytes, (_MAX_FLOPS - flops) // max(one_flops, 1)
        count = min(group.batch, int(min(room)))
        if not kept:
            count = max(count, 1)
        if count > 0:
            kept.append((count, group.q_len, group.kv_len))
            kv_bytes, flops = kv_bytes + count * one_bytes, flops + count * one_flops
    return replace(case, requests=tuple(kept))
