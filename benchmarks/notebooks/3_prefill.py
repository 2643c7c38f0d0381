# %% [markdown]
# # 3 · Prefill beside FlashAttention-3 and cuDNN
#
# A prompt of $n$ tokens attends to itself: $n^2/2$ pairs of a row and a key that causality leaves.
# Each key that is read serves a whole tile of rows, so prompts are bound by the matrix units, and
# their speed is quoted in TFLOP/s, with $4 \cdot D \cdot H$ operations a pair.

# %%
import math
import time

from cupyattn.bench import lab, peers
from cupyattn.bench.cases import Case
from cupyattn.bench.lab import plt
from cupyattn.bench.run import Settings, rows

lab.begin()

# %% [markdown]
# ## Beside other libraries
#
# Every figure is the median of calls that were timed one by one, with a cold L2, in turns with the
# other libraries in one process, after each answer had been checked against float64. Requests of
# equal length go to FlashAttention-3 and cuDNN as one dense array, which is their faster form.

# %%
dense = {"1 x 16k": "1x16k", "not causal": "1x16k_full", "4 x 4k": "4x4k", "D 64": "1x16k_d64_mha"}
dense |= {"D 256": "4x4k_d256"}
print(lab.peers("fa3")["on"])
fig, axis = plt.subplots(figsize=(7.6, 3.2))
groups = {}
for name, case in dense.items():
    row = lab.beside("fa3", case)
    who = ("cupyattn", "FlashAttention-3", "cuDNN")
    groups[name] = {w: row[w]["tflops"] for w in who if w in row}
lab.bars(axis, groups)
axis.set_ylabel("TFLOP/s")
lab.show()

# %% [markdown]
# Ragged batches, one request behind another with offsets, as servers have them:

# %%
ragged = {"4 x 4k": "ragged_4x4k", "16 x 1k": "ragged_16x1k", "32 x 512": "ragged_32x512"}
ragged |= {"16, Zipf": "ragged_zipf_16k"}
fig, axis = plt.subplots(figsize=(7.2, 3.0))
found = {name: lab.beside("fa3", case) for name, case in ragged.items()}
who = ("cupyattn", "FlashAttention-3")
lab.bars(axis, {name: {w: row[w]["tflops"] for w in who} for name, row in found.items()})
axis.set_ylabel("TFLOP/s")
lab.show()

# %% [markdown]
# ## The same on this machine
#
# 16k tokens in prompts of one length, beside what is installed of torch's SDPA (its own choice,
# and held to cuDNN) and flash-attn. FlashInfer compiles for minutes at its first call, so it is
# left out here: add it to `PEERS` if you have the time. On a GPU this cell takes about a minute.
# This is `cupyattn bench` as a library.

# %%
PEERS = ("sdpa", "flash_attn")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def prompts():
    cases = [
        Case(f"{16384 // n} x {lab.brief(n)}", "prefill", "", 16384 // n, n, n, page_size=0)
        for n in LENGTHS
    ]
    names = [name for name in PEERS if name in peers.NAMES]
    settings = Settings(cases, names, seed=1, deadline=time.time() + 60, rounds=6)
    found = {}
    for case in rows(settings, lab.arrays, lab.clock()):
        for row in case:
            if row["status"] == "timed":
                label = f"{row['name']} {row['variant']}".replace(" run", "")
                found.setdefault(label, {})[row["case"]] = round(row["rate"], 1)
            else:
                print(row["case"], row["name"], row["status"], row["note"])
    return {"tflops": found}


data = lab.measured("prefill", prompts)

# %%
if data:
    fig, axis = plt.subplots(figsize=(7.2, 3.2))
    styles = {
        "cupyattn": (lab.OURS, "-"),
        "flash-attn 3": (lab.FA3, "-"),
        "flash-attn 2": (lab.FA3, ":"),
        "SDPA cuDNN": (lab.CUDNN, "-"),
        "FlashInfer fa3": (lab.FLASHINFER, "-"),
        "FlashInfer fa2": (lab.FLASHINFER, ":"),
    }
    for name, values in data["tflops"].items():
        color, line = styles.get(name, (lab.OTHER, "-"))
        axis.plot(list(values), list(values.values()), "o", ls=line, color=color, label=name)
    axis.set_xlabel("prompts of a batch, causal, 32 query and 8 key heads of 128")
    axis.set_ylabel("TFLOP/s")
    axis.set_ylim(0)
    axis.legend(fontsize=8)
    lab.show()

# %% [markdown]
# ## Why short prompts are slower
#
# Of a tile of 128 rows and keys on the diagonal, half the pairs are hidden but computed. A prompt
# of $n$ has $n/128$ such tiles among $\tfrac12 (n/128)^2$ or so, and every tile of rows pays once
# for loading its queries and storing its answer:

# %%
tile = 128
shares = []
for n in LENGTHS:
    tiles = math.ceil(n / tile)
    computed = tiles * (tiles + 1) / 2 * tile**2
    shares.append(n * (n + 1) / 2 / computed)
    print(f"{lab.brief(n):>4} tokens: {100 * shares[-1]:5.1f} % of the computed pairs are visible")

# %% [markdown]
# **In short.** Long prompts run at the rate of large matrix products; short ones lose what the
# diagonal hides. Ragged batches cost nothing beside dense ones, because a plan deals tiles of all
# requests to all SMs: that is the next notebook.
