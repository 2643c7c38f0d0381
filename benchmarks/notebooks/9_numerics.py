# %% [markdown]
# # 9 · Numerics: errors, merges, and the same bits in every batch
#
# Attention in 16 bits is not exact. This notebook asks how far it is from float64, why answers
# over parts of the keys can be merged without loss, and when two runs give the same bits.

# %%
import itertools

import ml_dtypes
import numpy as np

import cupyattn
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## States
#
# Attention over *some* of the keys is a state: an answer $o$ and its log-sum-exp $s$, the
# logarithm (base 2) of the weight that these keys have in all. Two states over disjoint keys merge
# into that over all of them:
#
# $$ o = \frac{2^{s_a} o_a + 2^{s_b} o_b}{2^{s_a} + 2^{s_b}}, \quad s = \log_2(2^{s_a} + 2^{s_b}) $$
#
# Nothing is approximated, so keys may be split over blocks of threads, caches or GPUs. Here 200
# keys are cut in any three places:

# %%
rng = np.random.default_rng(0)
q = rng.standard_normal((16, 8, 64)).astype(np.float32)
k, v = rng.standard_normal((2, 200, 2, 64)).astype(np.float32)
whole = cupyattn.single_prefill_with_kv_cache(q, k, v)

for cuts in ([1, 50, 100], [64, 128, 192], [7, 8, 9]):
    edges = [0, *cuts, 200]
    states = [
        cupyattn.single_prefill_with_kv_cache(q, k[a:b], v[a:b], return_lse=True)
        for a, b in itertools.pairwise(edges)
    ]
    o, s = states[0]
    for other in states[1:]:
        o, s = cupyattn.merge_state(o, s, *other)
    print(f"cut at {cuts!s:16} largest difference {np.abs(o - whole).max():.1e} (float32)")

# %% [markdown]
# ## Why the maximum is subtracted
#
# $2^x$ overflows float32 at $x = 128$. Logits of that size do occur, so kernels keep the maximum
# $m$ of what a row has seen and compute $2^{x-m}$. A state whose maximum is far below another's
# then adds exactly nothing, and one that saw no key has $s = -\infty$ and adds nothing either:

# %%
o, s = cupyattn.single_prefill_with_kv_cache(200 * q, k, v, return_lse=True)
empty, none = np.full_like(o, np.nan), np.full_like(s, -np.inf)
merged, _ = cupyattn.merge_state(o, s, empty, none)
print(f"LSEs up to {s.max():,.0f}; all finite: {np.isfinite(o).all()}")
print("merged with an empty state of NaN: unchanged", bool((merged == o).all()))

# %% [markdown]
# ## The error against float64
#
# A bfloat16 number has 8 bits of precision: rounding the answer alone costs up to $2^{-9}$ of it.
# Kernels also round the probabilities before they multiply them with V. This is that arithmetic in
# NumPy: float32, with probabilities and the answer in 16 bits. The bars are RMS errors over the
# RMS of the answer; the black line is what rounding the exact answer to the same dtype costs.


# %%
def as_a_kernel(q, k, v, dtype):
    p = np.einsum("qhd,khd->hqk", q, k).astype(np.float32) / np.sqrt(np.float32(q.shape[2]))
    p = np.exp(p - p.max(2, keepdims=True))
    o = np.einsum("hqk,khd->qhd", p.astype(dtype).astype(np.float32), v)
    return (o / p.sum(2).T[..., None]).astype(dtype).astype(np.float64)


KEYS = (64, 256, 1024, 4096)
fig, axes = plt.subplots(1, 2, figsize=(7.6, 2.8))
for axis, dtype in zip(axes, (ml_dtypes.bfloat16, np.float16), strict=True):
    found = []
    for length in KEYS:
        a, b, c = (
            rng.standard_normal((n, 4, 64)).astype(dtype).astype(np.float32)
            for n in (8, length, length)
        )
        exact, _ = cupyattn.reference.attention(a, b, c)
        answers = as_a_kernel(a, b, c, dtype), exact.astype(dtype).astype(np.float64)
        found.append(
            [np.sqrt(np.square(x - exact).mean() / np.square(exact).mean()) for x in answers]
        )
    axis.bar(
        range(len(KEYS)),
        [kernel for kernel, _ in found],
        color=lab.OURS,
        width=0.6,
        label="a kernel's arithmetic",
    )
    axis.plot(
        range(len(KEYS)),
        [rounded for _, rounded in found],
        "_",
        ms=30,
        mew=2,
        color="black",
        label="rounding the exact answer",
    )
    axis.set_xticks(range(len(KEYS)), [lab.brief(n) for n in KEYS])
    axis.set_xlabel("keys")
    axis.set_title(f"{np.dtype(dtype).name}: relative RMS error")
    axis.grid(axis="x", visible=False)
    axis.set_ylim(0, 1.45 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper right", markerscale=0.4)
lab.show()

# %% [markdown]
# The kernels themselves, one decode of each length:


# %%
def errors():
    found = {}
    for dtype in ("bfloat16", "float16"):
        for length in (64, 256, 1024, 4096, 16384):
            noise = np.random.default_rng(length)
            numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
            shapes = (8, 32, 128), (length, 8, 128), (length, 8, 128)
            q, k, v = (noise.standard_normal(s, np.float32).astype(numpy_dtype) for s in shapes)
            exact, _ = cupyattn.reference.attention(q, k, v)
            o = lab.host(cupyattn.single_prefill_with_kv_cache(*(lab.put(x) for x in (q, k, v))))
            scale = np.sqrt(np.square(exact).mean())
            rounded = exact.astype(numpy_dtype).astype(np.float64)
            found.setdefault(dtype, {})[length] = [
                float(np.sqrt(np.square(x - exact).mean()) / scale) for x in (o, rounded)
            ]
    return {"rms": found}


data = lab.measured("numerics_errors", errors)

# %%
if data:
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 2.9))
    for axis, (dtype, rows) in zip(axes, data["rms"].items(), strict=True):
        lengths = [int(n) for n in rows]
        axis.bar(
            range(len(lengths)),
            [e for e, _ in rows.values()],
            color=lab.OURS,
            width=0.6,
            label="cupyattn",
        )
        axis.plot(
            range(len(lengths)),
            [r for _, r in rows.values()],
            "_",
            ms=26,
            mew=2,
            color="black",
            label="rounding the exact answer",
        )
        axis.set_xticks(range(len(lengths)), [lab.brief(n) for n in lengths])
        axis.set_xlabel("keys")
        axis.set_title(f"{dtype}: relative RMS error")
        axis.grid(axis="x", visible=False)
        axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axis.set_ylim(0, 1.45 * axis.get_ylim()[1])
        axis.legend(fontsize=8, loc="upper right", markerscale=0.4)
    lab.show()

# %% [markdown]
# ## The same bits in every batch
#
# Sums of floating-point numbers depend on their order. By default a plan splits a request's keys
# as the rest of the batch suggests, so its last bits depend on its neighbours. With
# `fixed_split_size` (or `disable_split_kv`) a request is split in the same places whatever else is
# there, and its answer is the same bit for bit. The same request of 8k keys in batches of several
# sizes:


# %%
def invariance():
    ways = {
        "default": {},
        "fixed_split_size=64": {"fixed_split_size": 64},
        "disable_split_kv": {"disable_split_kv": True},
    }
    found = {}
    sizes = (1, 2, 4, 16, 64)
    for label, options in ways.items():
        first, differ = None, {}
        for count in sizes:
            o = lab.host(lab.alone_and_with(count, 8192, **options))
            first = o if first is None else first
            differ[count] = float((o != first).mean())
        found[label] = differ
    batch = lab.paged([8192] * 4)
    calls = {name: lab.decode(batch, **options) for name, options in ways.items()}
    return {"differ": found, "us": lab.times(calls)}


data = lab.measured("numerics_invariance", invariance)

# %%
if data:
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 2.9), width_ratios=[1.5, 1])
    for (name, rows), marker in zip(data["differ"].items(), "os^", strict=True):
        color = lab.OTHER if name == "default" else lab.OURS
        sizes = [int(n) for n in rows]
        axes[0].plot(sizes, [100 * x for x in rows.values()], marker + "-", color=color, label=name)
    lab.log2_ticks(axes[0], sizes)
    axes[0].set_xlabel("requests of the batch")
    axes[0].set_ylabel("% of elements")
    axes[0].set_title("bits that differ from a batch of one")
    axes[0].legend(fontsize=8)
    labels = [name.replace("=", "\n= ").replace("_split_kv", "\n_split_kv") for name in data["us"]]
    drawn = axes[1].bar(labels, list(data["us"].values()), color=[lab.OTHER, lab.OURS, lab.OURS])
    axes[1].bar_label(drawn, fmt="{:,.0f}", fontsize=8)
    axes[1].set_title("µs, 4 requests of 8k")
    axes[1].tick_params(axis="x", labelsize=7.5)
    axes[1].grid(axis="x", visible=False)
    lab.show()

# %% [markdown]
# **In short.** Rounding to 16 bits is what costs accuracy, twice; merges lose nothing; and if you
# need the same bits in every batch, name the splits.
