# %% [markdown]
# # 7 · Latent attention (MLA)
#
# DeepSeek's models cache one row for each token and layer, from which keys and values of all heads
# follow: 512 *latent* columns and 64 with rotary positions. In the absorbed form the model
# multiplies its queries by $W_{UK}$ before the attention and the answer by $W_{UV}$ behind it.
# What is left is attention of many query heads over *one* key head of 576 columns, whose first 512
# are the values.

# %%
import numpy as np

import cupyattn
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## The bytes of a token
#
# In bfloat16, for one layer:

# %%
forms = {
    "MHA, 32 heads of 128": 2 * 32 * 128,
    "GQA, 8 key heads of 128": 2 * 8 * 128,
    "MQA, 1 key head of 128": 2 * 128,
    "MLA, 512 + 64": 512 + 64,
}
fig, axis = plt.subplots(figsize=(7.2, 2.0))
sizes = [2 * columns for columns in forms.values()]
drawn = axis.barh(list(forms), sizes, color=["#b9c7d6"] * 3 + [lab.OURS])
axis.bar_label(drawn, [f"{size:,}" for size in sizes], fontsize=8, padding=3)
axis.set_xlabel("bytes of a token (logarithmic)")
lab.log2_ticks(axis, [256, 512, 1024, 2048, 4096, 8192, 16384])
axis.set_xlim(256, 32768)
axis.invert_yaxis()
axis.grid(axis="y", visible=False)
lab.show()

# %% [markdown]
# ## It is ordinary attention
#
# The wrapper takes the latent and the rotary parts apart or in one array. The same answer comes
# from a plain call with one key head whose values are a slice of the keys:

# %%
rng = np.random.default_rng(0)
heads, page_size, length = 16, 64, 100
cache = rng.standard_normal((2, page_size, 576)).astype(np.float16)
q = rng.standard_normal((1, heads, 576)).astype(np.float16)
scale = (128 + 64) ** -0.5  # of the heads as they were before absorption

wrapper = cupyattn.BatchMLAPagedAttentionWrapper("cpu")
offsets = np.array([0, 1], np.int32)
wrapper.plan(
    offsets,
    np.array([0, 2], np.int32),
    np.array([1, 0], np.int32),
    np.array([length], np.int32),
    heads,
    512,
    64,
    page_size,
    True,
    scale,
    "float16",
    "float16",
)
o = wrapper.run(query=q, kv_cache=cache)
keys = cache[[1, 0]].reshape(-1, 1, 576)[:length]
plain, _ = cupyattn.reference.attention(q, keys, keys[..., :512], sm_scale=scale)
print(f"the wrapper and plain attention differ by at most {np.abs(o - plain).max():.1e}")

# %% [markdown]
# ## From memory to the matrix units
#
# Each 2-byte number of a latent row serves every query head twice, once as key and once as value:
# $\frac{2 \cdot (576 + 512)}{2 \cdot 576} h \approx 1.9\,h$ FLOP a byte. 16 heads (a model of 128
# divided over 8 GPUs) are bound by memory; 128 heads stand at the ridge, where both limits meet.


# %%
def heads_sweep():
    watch = lab.clock()
    requests, length = 32, 4096
    found = {"copy_gbps": watch.copy_gbps(), "us": {}, "requests": requests, "length": length}
    pages = requests * length // 64
    k = lab.arrays.normal(pages, 64, 576)
    order = np.random.default_rng(0).permutation(pages).astype(np.int32)
    for heads in (8, 16, 32, 64, 128):
        wrapper = cupyattn.BatchMLAPagedAttentionWrapper(lab.DEVICE)
        q = lab.arrays.normal(requests, heads, 576)
        offsets = np.arange(requests + 1, dtype=np.int32)
        lengths = np.full(requests, length, np.int32)
        indices = lab.arrays.int32(order)
        sizes = heads, 512, 64, 64, True, scale, q.dtype, k.dtype
        wrapper.plan(offsets, offsets * (length // 64), indices, lengths, *sizes)
        parts = q[..., :512], q[..., 512:], k[..., :512], k[..., 512:]
        call = {"us": lambda w=wrapper, p=parts: w.run(*p)}
        found["us"][heads] = lab.times(call, watch)["us"]
    return found


data = lab.measured("mla", heads_sweep)

# %%
if data:
    tokens = data["requests"] * data["length"]
    heads = [int(h) for h in data["us"]]
    us = list(data["us"].values())
    gbps = [tokens * 576 * 2 / t / 1e3 for t in us]
    tflops = [2 * (576 + 512) * h * tokens / t / 1e6 for h, t in zip(heads, us, strict=True)]
    fig, axes = plt.subplots(1, 3, figsize=(7.8, 2.7))
    for axis, values, label in (
        (axes[0], us, "µs"),
        (axes[1], gbps, "GB/s"),
        (axes[2], tflops, "TFLOP/s"),
    ):
        axis.plot(heads, values, "o-", color=lab.OURS)
        lab.log2_ticks(axis, heads)
        axis.set_ylim(0, 1.1 * max(values))
        axis.set_title(label)
        axis.set_xlabel("query heads")
    axes[1].axhline(data["copy_gbps"], color="black", ls="--", lw=1)
    axes[1].set_ylim(0, 1.1 * data["copy_gbps"])
    axes[1].text(heads[-1], data["copy_gbps"], "copy", ha="right", va="bottom", fontsize=8)
    lab.show()

# %% [markdown]
# ## Beside FlashMLA and FlashAttention-3
#
# The latter with its `qv` argument:

# %%
names = {
    "128 x 4k,\n128 heads": "mla_128x4k_h128",
    "32 x 8k,\n16 heads": "mla_32x8k_h16",
    "8 x 8k,\n16 heads": "mla_8x8k_h16",
    "1 x 32k,\n128 heads": "mla_1x32k_h128",
    "4 of 2k to 45k,\n16 heads": "mla_skew_h16",
}
who = ("cupyattn", "FlashMLA", "FlashAttention-3")
print(lab.peers("fa3")["on"])
fig, axis = plt.subplots(figsize=(7.4, 3.0))
found = {name: lab.beside("fa3", case) for name, case in names.items()}
lab.bars(
    axis,
    {n: {w: r[w]["us"] for w in who if w in r} for n, r in found.items()},
)
axis.set_ylabel("µs")
lab.show()

# %% [markdown]
# **In short.** A latent cache has about a quarter of the bytes of GQA with 8 heads, and its decode
# has enough arithmetic for each byte to reach the matrix units. Prompts are cheaper unabsorbed,
# with head dims of 192 and 128 in the ragged wrapper.
