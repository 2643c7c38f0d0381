# %% [markdown]
# # 11 · Eight bits: what they cost and what they gain
#
# A number of eight bits halves the bytes of one of sixteen, and Hopper multiplies it at twice the
# rate. It also has three bits of mantissa (e4m3), or 255 values in all (int8). This notebook asks
# how much of the answer is left, what scales, rotation and smoothing do for it, and what a prompt
# gains. Everything but the last figures runs without a GPU.

# %%
import ml_dtypes
import numpy as np

import cupyattn
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## Two ways to round
#
# A scale maps the largest magnitude of what shares it to the largest number that the dtype has.
# int8 then divides the range into equal steps: what is large is kept to a hundredth, what is small
# is lost. e4m3 has an exponent: every magnitude is kept to a sixteenth.

# %%
x = np.logspace(-4, 0, 16000).reshape(80, 200)  # of the largest that shares the scale
rounded = {
    "int8": np.round(127 * x) / 127,
    "e4m3": (448 * x).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 448,
}
fig, axis = plt.subplots(figsize=(7.2, 2.8))
for (name, y), color in zip(rounded.items(), (lab.OTHER, lab.OURS), strict=True):
    worst = (np.abs(y - x) / x).max(1)
    axis.loglog(x[:, 100], worst, color=color, label=name)
axis.set_ylim(1e-3, 2)
axis.set_xlabel("magnitude, of the largest that shares its scale")
axis.set_ylabel("largest relative error")
axis.legend(loc="lower left")
lab.show()

# %% [markdown]
# ## The error of an attention
#
# `quantize_qkv` stores queries, keys and values in eight bits and returns their scales under the
# names that attention gives its arguments. So two lines are a whole program. The answer is held
# against float64 of the numbers before they were rounded.


# %%
def relative_error(o, exact):
    return float(np.linalg.norm(o.astype(np.float64) - exact) / np.linalg.norm(exact))


def in_eight_bits(q, k, v, **ways):
    stored = cupyattn.quantize_qkv(q, k, v, **ways)
    return cupyattn.single_prefill_with_kv_cache(**stored._asdict(), o_dtype="float16")


def inputs(kind, keys=2048, rows=16, heads=2):
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((n, heads, 128)) for n in (rows, keys, keys))
    if kind == "outliers":  # FlashAttention-3's: a thousandth of all elements is large
        for x in (q, k, v):
            x += 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
    if kind == "channels":  # four channels of the keys lie far from zero, as biases make them
        k[..., [3, 40, 77, 120]] += np.array([9, -12, 15, -8])
    return [x.astype(np.float16) for x in (q, k, v)]


WAYS = {
    "e4m3, a scale a head": {"scales": "head"},
    "e4m3, a scale for 64 tokens": {},
    "the same, rotated": {"hadamard": True},
    "int8, a scale a head": {"dtype": "int8", "scales": "head"},
    "int8, a scale for 64 tokens": {"dtype": "int8"},
    "the same, rotated, smoothed": {"dtype": "int8", "hadamard": True, "smooth_k": True},
}
KINDS = ("normal", "outliers", "channels")
errors = {}
for kind in KINDS:
    q, k, v = inputs(kind)
    exact, _ = cupyattn.reference.attention(q, k, v)
    for name, ways in WAYS.items():
        errors[name, kind] = 100 * relative_error(in_eight_bits(q, k, v, **ways), exact)
    print(kind, {name: round(errors[name, kind], 1) for name in WAYS})

# %%
shades = ["#f3b8a0", "#e0604c", lab.OURS, "#d9d9d9", "#a9a9a9", "#6e6e6e"]
fig, axis = plt.subplots(figsize=(7.6, 3.2))
for i, (name, shade) in enumerate(zip(WAYS, shades, strict=True)):
    places = np.arange(len(KINDS)) + 0.13 * (i - 2.5)
    drawn = axis.bar(places, [errors[name, kind] for kind in KINDS], 0.12, color=shade, label=name)
    axis.bar_label(drawn, fmt="%.1f", fontsize=6.5, padding=1)
axis.set_xticks(range(len(KINDS)), KINDS)
axis.set_ylabel("error of the answer, %")
axis.grid(axis="x", visible=False)
axis.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0))
lab.show()

# %% [markdown]
# - Scales of blocks keep an outlier from spoiling other tokens. Without outliers they help little.
# - A rotation spreads an outlier over the head's channels and leaves every product as it was.
#   Smoothing takes the keys' mean away: a row's logits then change by a constant, which softmax
#   does not see.
# - Values are e4m3 in all of this: what is left at the right is theirs.
#
# A kernel also rounds probabilities to e4m3, and its sums must leave the tensor cores now and then,
# which keep 14 bits. The page on eight bits has errors of the kernels themselves.
#
# ## What a prompt gains
#
# Prompts of one length, 16k tokens in all, causal, 32 query and 8 key heads of 128: attention in 16
# bits, the same in 8, and the launch that makes eight bits of sixteen, which projections of an
# engine may do on their way. On a GPU the next cell takes half a minute.

# %%
TOKENS, LENGTHS = 16384, (512, 1024, 2048, 4096, 8192, 16384)


def prompt(length, q, k, v, dtype, **scales):
    """The planned call for prompts of `length` tokens each."""
    offsets = np.arange(0, q.shape[0] + 1, length, dtype=np.int32)
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(lab.DEVICE)
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": "bfloat16"}
    wrapper.plan(offsets, offsets, 32, 8, 128, causal=True, **dtypes)
    return lambda: wrapper.run(q, k, v, **scales)


def prompts(tokens=TOKENS, lengths=LENGTHS):
    watch, us = lab.clock(), {}
    q, k, v = (lab.arrays.normal(tokens, heads, 128) for heads in (32, 8, 8))
    head = cupyattn.quantize_qkv(q, k, v, scales="head")
    scales = {"q_scale": head.scale_q, "k_scale": head.scale_k, "v_scale": head.scale_v}
    for length in lengths:
        calls = {
            "16 bits": prompt(length, q, k, v, "bfloat16"),
            "8 bits": prompt(length, head.q, head.k, head.v, "float8_e4m3fn", **scales),
            "to 8 bits": lambda: cupyattn.quantize_qkv(q, k, v),
        }
        us[length] = lab.times(calls, watch)
    return {"us": us}


data = lab.measured("eight_bits", prompts)

# %%
if data:
    lengths = [int(n) for n in data["us"]]
    fig, axes = plt.subplots(1, 2, figsize=(7.8, 3.0))
    for name, color in (("16 bits", lab.OTHER), ("8 bits", lab.OURS)):
        flop = [4 * 32 * 128 * TOKENS * n / 2 for n in lengths]
        us = [row[name] for row in data["us"].values()]
        rates = [f / t / 1e6 for f, t in zip(flop, us, strict=True)]
        axes[0].plot(lengths, rates, "o-", color=color, label=name)
    gain = [row["16 bits"] / row["8 bits"] for row in data["us"].values()]
    both = [row["16 bits"] / (row["8 bits"] + row["to 8 bits"]) for row in data["us"].values()]
    axes[1].plot(lengths, gain, "o-", color=lab.OURS, label="attention")
    axes[1].plot(lengths, both, "o:", color=lab.OURS, label="with the launch that rounds")
    axes[1].axhline(1, color="black", ls="--", lw=1)
    axes[0].set_title("TFLOP/s")
    axes[1].set_title("time in 16 bits, over that in 8")
    for axis in axes:
        lab.log2_ticks(axis, lengths)
        axis.set_ylim(0)
        axis.set_xlabel("tokens of a prompt")
        axis.legend(fontsize=8, loc="lower right")
    lab.show()

# %% [markdown]
# Products are twice as fast, and the exponentials, the copies and the power that a card may draw
# are what they were. On an H200 that leaves nothing: prompts of 16k tokens take what they take in
# 16 bits, and shorter ones take longer. Decode is another matter. It is bound by the bytes of the
# cache, which halve as soon as keys and values are stored in eight bits, whatever queries are
# (notebook 2).
#
# **In short.** Store the cache in fp8 first: that is where the time is. Multiply in eight bits
# where inputs come in them anyway, with scales of blocks, and rotate or smooth what has outliers.
