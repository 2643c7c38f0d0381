# %% [markdown]
# # 2 · Decode against the roofline
#
# A decode step computes attention of *one* new token for each request. It must read every key and
# value of the request once, and it does little with each: with a group of $g$ query heads to a key
# head, each 2-byte number read serves $2g$ operations, an intensity of $g$ FLOP a byte. A modern
# GPU can do some 170 operations in the time of a byte. Decode is therefore bound by memory, and
# its speed is quoted in GB/s.

# %%
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## Where decode stands
#
# The roof is what the GPU can do at most at each intensity: the bandwidth times the intensity,
# until the matrix units are the limit. Both ceilings were measured in the run of each point, by a
# copy of 2 GiB and by a product of two 8192 x 8192 matrices.

# %%
run = lab.peers("fa3")
top = run["ceilings"]
print(run["on"])
points = {
    "decode, group of 1": "decode_64x4k_mha",
    "decode, group of 4": "decode_64x8k",
    "decode, group of 8, D 64": "decode_64x8k_h64_d64",
    "latent, 16 heads": "mla_32x8k_h16",
    "latent, 128 heads": "mla_128x4k_h128",
    "append, 8 rows a request": "append_64x8_4k",
    "append, 512 rows": "append_8x512_8k",
    "prompt of 16k": "1x16k",
}
fig, axis = plt.subplots(figsize=(7.2, 3.8))
intensity = [0.5 * 2**i for i in range(15)]
axis.plot(
    intensity,
    [min(top["tflops"], top["gbps"] * x / 1e3) for x in intensity],
    color="black",
    label="roof, measured",
)
markers = "os^DvP*X"
for marker, (name, case) in zip(markers, points.items(), strict=True):
    row = lab.beside("fa3", case)["cupyattn"]
    x = 1e3 * row["tflops"] / row["gbps"]
    axis.plot(x, row["tflops"], marker, ms=7, label=name)
lab.log2_ticks(axis, [1, 4, 16, 64, 256, 1024, 4096])
axis.set_yscale("log")
axis.set_yticks([3, 10, 30, 100, 300, 1000], ["3", "10", "30", "100", "300", "1,000"])
axis.minorticks_off()
axis.set_ylim(2, 1200)
axis.set_xlabel("FLOP for each byte that must move")
axis.set_ylabel("TFLOP/s")
axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
lab.show()

# %% [markdown]
# ## How many requests it takes
#
# One request of 2k keys has 8 MB. That is too little to keep the memory busy: a launch, the first
# bytes of a block and the merge of split keys take some 10 µs whatever the size. The planner
# splits the keys of few requests over all SMs; with many requests there is enough to do without.


# %%
def sweeps():
    watch = lab.clock()
    found = {"copy_gbps": watch.copy_gbps(), "batch": {}, "length": {}, "page": {}}
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        call = lab.decode(lab.paged([2048] * batch))
        found["batch"][batch] = lab.times({"us": call}, watch)["us"]
    for length in (256, 512, 1024, 2048, 4096, 8192, 16384):
        call = lab.decode(lab.paged([length] * 32))
        found["length"][length] = lab.times({"us": call}, watch)["us"]
    sizes = (1, 2, 4, 16, 64, 128)
    calls = {str(n): lab.decode(lab.paged([4096] * 32, page_size=n)) for n in sizes}
    found["page"] = lab.times(calls, watch)
    return found


data = lab.measured("decode_roofline", sweeps)

# %% [markdown]
# The more bytes of keys there are, the nearer the rate comes to a copy's, in the run beside
# FlashAttention-3:

# %%
sizes = {"64 x 1k": "decode_64x1k", "8 x 8k": "decode_8x8k", "1 x 128k": "decode_1x128k"}
sizes |= {"256 x 2k": "decode_256x2k", "64 x 8k": "decode_64x8k"}
found = {name: lab.beside("fa3", case) for name, case in sizes.items()}
fig, axis = plt.subplots(figsize=(7.2, 3.0))
who = ("cupyattn", "FlashAttention-3")
lab.bars(axis, {name: {w: row[w]["gbps"] for w in who} for name, row in found.items()})
axis.axhline(top["gbps"], color="black", ls="--", lw=1)
axis.set_ylabel("GB/s")
lab.show()

# %%
if data:
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.0), sharey=True)
    for axis, key, label in (
        (axes[0], "batch", "requests of 2k keys"),
        (axes[1], "length", "keys of each of 32 requests"),
    ):
        sizes = [int(n) for n in data[key]]
        tokens = [n * (2048 if key == "batch" else 32) for n in sizes]
        rates = [
            lab.decode_bytes(t) / us / 1e3 for t, us in zip(tokens, data[key].values(), strict=True)
        ]
        axis.plot(sizes, rates, "o-", color=lab.OURS)
        axis.axhline(data["copy_gbps"], color="black", ls="--", lw=1)
        axis.text(sizes[0], data["copy_gbps"], "copy", va="bottom", fontsize=8)
        lab.log2_ticks(axis, sizes)
        axis.set_xlabel(label)
    axes[0].set_ylabel("GB/s of keys and values")
    axes[0].set_ylim(0)
    lab.show()

# %% [markdown]
# A decode may read *faster* than a copy, because a copy also writes, and turning the memory round
# between the two costs bandwidth.
#
# ## Pages
#
# A page table says where each block of tokens is. Small pages waste no memory at the end of a
# request and can be shared at any token; large ones need fewer table entries and let a copy
# instruction move more at a time. The kernel fetches page numbers ahead of the keys, so the price
# of small pages is low:

# %%
pages = {"1": "decode_64x8k_p1", "16": "decode_64x8k", "64": "decode_64x8k_p64"}
found = {name: lab.beside("fa3", case) for name, case in pages.items()}
fig, axis = plt.subplots(figsize=(5.6, 2.8))
who = ("cupyattn", "FlashAttention-3")
lab.bars(axis, {name: {w: row[w]["us"] for w in who} for name, row in found.items()})
axis.set_xlabel("tokens of a page; 64 requests of 8k keys")
axis.set_ylabel("µs")
lab.show()

# %% [markdown]
# More page sizes, 32 requests of 4k keys:

# %%
if data:
    fig, axis = plt.subplots(figsize=(7.2, 2.6))
    pages = data["page"]
    rates = [lab.decode_bytes(32 * 4096) / us / 1e3 for us in pages.values()]
    drawn = axis.bar(list(pages), rates, color=lab.OURS, width=0.6)
    axis.bar_label(drawn, [f"{us:.1f} µs" for us in pages.values()], fontsize=8, padding=2)
    axis.axhline(data["copy_gbps"], color="black", ls="--", lw=1)
    axis.set_ylim(0, 1.15 * max(rates))
    axis.set_xlabel("tokens of a page; 32 requests of 4k keys")
    axis.set_ylabel("GB/s")
    axis.grid(axis="x", visible=False)
    lab.show()

# %% [markdown]
# ## Fewer bytes
#
# As decode is bound by bytes, halving them nearly halves the time. An fp8 cache does (64 requests
# of 8k keys, in a run beside FlashInfer):

# %%
print(lab.peers("flashinfer")["on"])
cases = {"bfloat16 keys": "decode_64x8k", "fp8 keys": "decode_64x8k_fp8"}
rows = {name: lab.beside("flashinfer", case) for name, case in cases.items()}
fig, axis = plt.subplots(figsize=(5.6, 2.8))
lab.bars(
    axis,
    {
        name: {who: found[who]["us"] for who in ("cupyattn", "FlashInfer") if who in found}
        for name, found in rows.items()
    },
)
axis.set_ylabel("µs")
lab.show()

# %% [markdown]
# **In short.** Count the bytes, divide by the bandwidth, and you know what a decode can take. With
# a gigabyte of keys it takes about that, with pages of any size; below, launches and merges show.
