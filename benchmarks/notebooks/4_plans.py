# %% [markdown]
# # 4 · Paged batches, skew, and what a plan does
#
# A server's batch is uneven: one chat has 128k tokens, most have a few hundred. If each request
# went to one block of threads, the GPU would wait for the longest. `plan()` looks at the lengths
# once, on the host, and writes a *work list*: which tile of rows meets which part of which
# request's keys. Every layer of the model then runs the same list.

# %%
import time

import numpy as np

from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## A page table
#
# Keys live in a pool of pages. Three arrays say which pages a request owns: `indices` are page
# numbers, `indptr` says where each request begins in them, `last_page_len` how full its last page
# is.

# %%
batch = lab.paged([37, 5, 60], page_size=16)
print("indptr       ", batch.indptr)
print("indices      ", lab.host(batch.indices).astype(int))
print("last_page_len", batch.last_page_len)

# %% [markdown]
# ## The work list
#
# 64 requests: one of 64k keys, two of 16k, five of 4k, sixteen of 1k and forty of 256. An H100 has
# 132 SMs, and two blocks of the decode kernel fit on each: 264 slots. The planner is a function of
# integers, so it runs without a GPU.

# %%
lengths = np.array([65536] + [16384] * 2 + [4096] * 5 + [1024] * 16 + [256] * 40)
plans = {
    "unsplit": lab.work_list(lengths, num_sms=132, may_split=False),
    "planned": lab.work_list(lengths, num_sms=132),
}
for name, made in plans.items():
    print(f"{name:8} {made.num_items:4} items, {made.num_split_requests} of 64 requests are split")

# %% [markdown]
# Each item is one block for each of the 8 key heads. The GPU deals blocks in the order of the list
# to whatever slot is free. Here is that game, with the planner's own costs: a block pays 2 key
# tiles' time for its start, and one for each tile of keys.

# %%
SHADES = {65536: "#7a0019", 16384: lab.OURS, 4096: "#e8795f", 1024: "#f3b8a0", 256: "#b9c7d6"}


def gantt(axis, played, end):
    for length, shade in SHADES.items():
        chosen = [block[:3] for block in played if lengths[block.request] == length]
        slots, begins, widths = (np.array(x) for x in zip(*chosen, strict=True))
        axis.barh(
            slots, widths, left=begins, height=1, color=shade, ec="white", lw=0.1, rasterized=True
        )
        axis.bar(0, 0, color=shade, label=f"{lab.brief(length)} keys")
    axis.set_xlim(0, end)
    axis.set_ylim(plans["planned"].num_slots, 0)
    axis.grid(False)


games = {name: made.play() for name, made in plans.items()}
ends = {name: max(b.begin + b.time for b in played) for name, played in games.items()}
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.6), sharey=True)
for axis, (name, played) in zip(axes, games.items(), strict=True):
    gantt(axis, played, ends[name])
    busy = sum(block.time for block in played) / (ends[name] * plans[name].num_slots)
    axis.set_title(f"{name}: {ends[name]:.0f} tiles' time, {100 * busy:.0f} % busy")
    axis.set_xlabel("time, in key tiles")
axes[0].set_ylabel("slot of the GPU")
axes[0].legend(fontsize=8, loc="lower right")
lab.show()

# %% [markdown]
# Unsplit, 8 blocks (one for each key head) work through the long request's 512 tiles each while
# the other slots soon stand empty. The plan cuts long requests into parts that end together; short
# ones fill what is left. The parts are *states* (an answer and its log-sum-exp), and the block
# that is last of a request merges them: notebook 9 shows why that is exact.
#
# ## What it is worth


# %%
def skewed():
    watch = lab.clock()
    batch = lab.paged(lengths.tolist())
    even = lab.paged([int(lengths.mean())] * 64)  # the same number of keys
    found = lab.times(
        {
            "equal lengths": lab.decode(even),
            "skewed, planned": lab.decode(batch),
            "skewed, unsplit": lab.decode(batch, disable_split_kv=True),
        },
        watch,
    )
    plan_us = {}
    for count in (16, 64, 256, 1024):
        tables = lab.paged([512] * count, heads=(4, 1), head_dim=64)
        wrapper = lab.cupyattn.BatchDecodeWithPagedKVCacheWrapper(lab.DEVICE)
        seconds = []
        for _ in range(60):
            start = time.perf_counter()
            wrapper.plan(*tables.tables, 4, 1, 64, 16, q_data_type="bfloat16")
            seconds.append(time.perf_counter() - start)
        plan_us[count] = round(1e6 * float(np.median(seconds[20:])), 1)
    return {"us": found, "plan_us": plan_us}


data = lab.measured("plans", skewed)
if data:
    print("plan(), µs of the host:", {int(n): us for n, us in data["plan_us"].items()})
    fig, axis = plt.subplots(figsize=(5.6, 2.6))
    drawn = axis.bar(list(data["us"]), list(data["us"].values()), color=lab.OURS, width=0.6)
    axis.bar_label(drawn, fmt="{:,.0f}", fontsize=8, padding=1)
    axis.set_ylabel("µs")
    axis.grid(axis="x", visible=False)
    lab.show()

# %% [markdown]
# One request of 128k keys and 63 of 512, beside FlashInfer's plan:

# %%
run = lab.peers("flashinfer")
print(run["on"])
row = lab.beside("flashinfer", "decode_skew")
who = ("cupyattn", "FlashInfer")
fig, axis = plt.subplots(figsize=(4.2, 2.6))
drawn = axis.bar(who, [row[w]["us"] for w in who], color=[lab.COLORS[w] for w in who], width=0.5)
axis.bar_label(drawn, fmt="{:,.0f}", fontsize=8, padding=1)
axis.set_ylabel("µs")
axis.grid(axis="x", visible=False)
lab.show()

# %% [markdown]
# **In short.** A plan takes about 100 µs of the host, once a step for all layers, and keeps a
# skewed batch near the rate of the memory.
