# %% [markdown]
# # 10 · Lists of keys: when they pay
#
# Models of 2026 let each token choose the keys that it attends to: an index scores blocks of keys,
# the best of them make a list, and attention reads what the list names. Two steps must together
# take less than reading everything. This notebook asks when they do.

# %%
import numpy as np

from cupyattn import reference, sparse
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## What is lost, and what is not
#
# A list of all blocks is plain attention. A shorter one leaves out what the index thinks little of.
# Here keys that matter stand in two blocks, and the index has the keys themselves:

# %%
rng = np.random.default_rng(0)
keys, block = 1024, 64
k, v = (rng.standard_normal((1, keys, 1, 64)).astype(np.float16) for _ in "kv")
q = rng.standard_normal((1, 1, 64)).astype(np.float16)
k[0, 300:310] += q[0]
k[0, 900:910] += q[0]
exact, _ = reference.attention(q, k[0], v[0])
for topk in (1, 2, 4, keys // block):
    lists = sparse.select(q, k[:, :, 0], topk=topk, block=block)
    out = sparse.attend(q, (k, v), lists, granularity=block)
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    print(f"{topk:2} of {keys // block} blocks: error {error:.1e}, blocks {lists[0, 0, :4]}")

# %% [markdown]
# ## Bytes
#
# MiniMax-M3 has four KV heads of 128 columns: 2,048 bytes a key in bfloat16. Its index has one key
# of 128 columns, 256 bytes, for each key. So a step with lists reads an eighth of what a plain
# decode reads, for the scores, and 16 blocks of 128 keys besides, however long the request is.

# %%
OF_KEY, OF_INDEX, LISTED = 2048, 256, 16 * 128
lengths = 2.0 ** np.arange(11, 18)
dense, listed = lengths * OF_KEY, lengths * OF_INDEX + LISTED * OF_KEY
fig, axis = plt.subplots()
axis.plot(lengths, dense / 1e6, color=lab.OTHER, label="all keys")
axis.plot(lengths, listed / 1e6, color=lab.OURS, label="index and 2,048 listed keys")
axis.set_xscale("log", base=2)
axis.set_yscale("log")
axis.set_xticks(lengths, [lab.brief(int(n)) for n in lengths])
axis.set_xlabel("keys of a request")
axis.set_ylabel("MB read for a token")
axis.legend()
lab.show()
print(f"the same bytes at {LISTED * OF_KEY / (OF_KEY - OF_INDEX):,.0f} keys")

# %% [markdown]
# ## Measured steps
#
# A step is a selection and the attention to what it chose. Beside it stands the
# least that a plain decode can take: its bytes at the rate at which this card reads memory, which
# was measured in the same run.

# %%
data = lab.measured_before("lists")
select, attend = data["select"], data["attend"]["cases"]
rate = select["read_TBs"]
print(f"memory is read at {rate:.2f} TB/s")
fig, axes = plt.subplots(1, 3, figsize=(7.8, 3.0))
for axis, n in zip(axes, (8192, 32768, 131072), strict=True):
    rows = (1, 8, 32)
    chosen = np.array([select["cases"][f"{b}x{n}"]["ours"] for b in rows])
    read = np.array([attend[f"m3 b{b}"]["ours"] for b in rows])
    all_keys = np.array([b * n * OF_KEY / rate / 1e6 for b in rows])
    x = np.arange(3)
    axis.bar(x - 0.2, chosen, 0.38, color="#e58b98", label="select")
    axis.bar(x - 0.2, read, 0.38, bottom=chosen, color=lab.OURS, label="attend")
    axis.bar(x + 0.2, all_keys, 0.38, color=lab.OTHER, label="bytes of all keys")
    for at, gain in zip(x, all_keys / (chosen + read), strict=True):
        top = max(all_keys[at], (chosen + read)[at]) + 0.02 * all_keys[-1]
        axis.text(at, top, f"{gain:.1f}×", ha="center")
    axis.set_xticks(x, rows)
    axis.set_title(f"{lab.brief(n)} keys")
    axis.set_xlabel("requests")
axes[0].set_ylabel("µs")
axes[0].legend(fontsize=8)
lab.show()

# %% [markdown]
# One request of 8k keys is too little: all of its keys are read before two kernels have begun.
# Lists win from 8k keys on with 32 requests, from 32k with eight, and from 128k with one. The
# selection is then most of the step.
#
# ## Reading a list where it lies
#
# Without a kernel for lists a program copies what is listed and decodes the copy. The listed keys
# are then read, written, and read again:

# %%
names = {"m3 b1": "M3, 1", "m3 b8": "M3, 8", "m3 b32": "M3, 32"}
names |= {"qsa b1": "QSA, 1", "qsa b8": "QSA, 8", "qsa b32": "QSA, 32"}
colors = {"cupyattn": lab.OURS, "copy, then decode": lab.OTHER, "decode of as many keys": "#c9c9c9"}
fig, axis = plt.subplots()
for at, case in enumerate(names):
    row = attend[case]
    found = {"cupyattn": row["ours"], "copy, then decode": row["gather + decode"]}
    if "decode of as many keys" in row:
        found["decode of as many keys"] = row["decode of as many keys"]
    for i, (name, us) in enumerate(found.items()):
        axis.bar(at + 0.27 * (i - 1), us, 0.25, color=colors[name], label=name if at == 0 else None)
axis.set_xticks(range(len(names)), names.values())
axis.set_xlabel("model, requests")
axis.set_ylabel("µs")
axis.legend()
lab.show()

# %% [markdown]
# M3's blocks of 128 keys cost hardly more than keys that lie side by side. QSA's blocks have four
# keys: a row of the cache is still whole, so that bytes are not wasted, but each needs its own look
# into the page table.
#
# ## Prompts: what neighbours share
#
# In a prompt each token has a list of its own. Sixteen heads of a token share a block, which is too
# little arithmetic for what is read. Neighbouring tokens choose alike, though: where eight of them
# read the union of their lists together, its blocks are read once for all.

# %%
prefill = data["prefill"]["cases"]
kept = {"0.0": "none", "0.8": "80 %", "0.95": "95 %"}
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.0))
rows = [prefill[f"4096 of 32768 kept {name}"] for name in kept]
axes[0].bar(range(3), [row["blocks of a union of 8"] for row in rows], color=lab.OURS)
axes[0].axhline(16, color=lab.OTHER, label="blocks of one list")
axes[0].axhline(8 * 16, color=lab.OTHER, linestyle=":", label="of eight lists")
axes[0].set_ylabel("blocks of a union")
axes[0].legend()
for i, (name, color) in enumerate(
    (("unions", lab.OURS), ("own lists", "#e58b98"), ("Triton", lab.OTHER))
):
    us = [row[name] for row in rows]
    axes[1].bar(np.arange(3) + 0.27 * (i - 1), us, 0.25, color=color, label=name)
axes[1].set_ylabel("µs, 4,096 tokens behind 28k keys")
axes[1].set_ylim(0, 3600)
axes[1].legend(ncols=3, fontsize=8, loc="upper center")
for axis in axes:
    axis.set_xticks(range(3), kept.values())
    axis.set_xlabel("of a list that the next token keeps")
lab.show()

# %% [markdown]
# Lists of real models are not to be had here: these are drawn, and each token keeps a share of what
# the token before it had.
#
# ## Beside other kernels
#
# A sweep draws calls of such models, their heads, lengths and lists, and runs each in one process
# with other libraries: the Triton kernels of vLLM, FlashInfer, FlashAttention-3 and FlashMLA. These
# are given page tables, plans and 16-bit copies that were made beforehand. A point is one call: how
# many times as long as cupyattn the fastest of them takes.

# %%
sweep = data["sweep"]
ratios = {kind: np.array(found) for kind, found in sweep["kinds"].items()}
print(f"{sum(map(len, ratios.values()))} calls on {sweep['on']}, seed {sweep['seed']}")
fig, axis = plt.subplots(figsize=(7.6, 3.4))
for at, found in enumerate(ratios.values()):
    spread = np.linspace(-0.22, 0.22, len(found)) if len(found) > 1 else np.zeros(1)
    axis.scatter(at + spread, found, s=14, color=lab.OURS, alpha=0.7)
    axis.hlines(np.exp(np.log(found).mean()), at - 0.36, at + 0.36, color="#333333")
axis.axhline(1, color=lab.OTHER, linestyle=":")
axis.set_yscale("log", base=2)
axis.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
axis.set_xticks(range(len(ratios)), [kind.replace(" ", "\n") for kind in ratios], fontsize=8)
axis.set_ylabel("fastest other / cupyattn")
lab.show()
for kind, found in ratios.items():
    print(f"{kind:11} {len(found):3} calls, mean {np.exp(np.log(found).mean()):.2f}")

# %% [markdown]
# The bars are geometric means. Prompts of large blocks gain most, because neighbours share what
# they read. A single token of each of many requests is bound by memory, and there no kernel can
# gain.
#
# **In short.** Lists pay from some tens of thousands of keys on, sooner with many requests. What is
# left to read is then the index, and its rows should be few or short. Blocks may be small if they
# are read where they lie. In prompts it is the overlap of neighbours that counts.
