# %% [markdown]
# # 6 · Verifying a tree of drafts
#
# Speculative decoding lets a small model guess several tokens, and the large model check all of
# them in one step. Guesses may branch: then they form a tree, and each node must see the keys of
# the request and its own ancestors, but not the other branches.

# %%
import numpy as np

import cupyattn
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## The tree and its mask
#
# Node $i$ sees node $j$ if $j$ is on its path to the root. The mask is one small matrix for each
# request; all earlier keys are seen by all.

# %%
parents = [-1, 0, 0, 1, 1, 2, 2, 3]
n = len(parents)
mask = np.eye(n, dtype=bool)
for node, parent in enumerate(parents):
    if parent >= 0:
        mask[node] |= mask[parent]

depth = [int(row.sum()) - 1 for row in mask]
place = {0: 0.0}
for node in range(1, n):
    siblings = [i for i in range(n) if parents[i] == parents[node]]
    offset = 0.0 if len(siblings) == 1 else siblings.index(node) - 0.5
    place[node] = place[parents[node]] + offset * 4 / 2 ** depth[node]

fig, axes = plt.subplots(1, 2, figsize=(6.8, 2.9), width_ratios=[1.4, 1])
tree, matrix = axes
for node, parent in enumerate(parents):
    if parent >= 0:
        tree.plot([place[parent], place[node]], [-depth[parent], -depth[node]], color="#b0b0b0")
for node in range(n):
    path = mask[7, node]
    tree.plot(place[node], -depth[node], "o", ms=17, color=lab.OURS if path else "#d9dfe6")
    tree.annotate(
        str(node),
        (place[node], -depth[node]),
        ha="center",
        va="center",
        color="white" if path else "black",
    )
tree.set_axis_off()
tree.set_title("drafts; the path of node 7")
matrix.imshow(mask, cmap="Reds", vmax=1.3)
matrix.set_xticks(range(n))
matrix.set_yticks(range(n))
matrix.set_title("who sees whom")
matrix.grid(False)
lab.show()

# %% [markdown]
# ## One call
#
# `q_len_per_req` says that each request has 8 rows at its end; `run(mask=)` brings the trees, here
# as 8 bools a row. To see that it means what it says, each path is decoded by itself, as if it
# were the end of an ordinary request:

# %%
rng = np.random.default_rng(0)
earlier, heads, head_dim, page_size = 40, (8, 2), 64, 16
k, v = rng.standard_normal((2, earlier + n, heads[1], head_dim)).astype(np.float16)
q = rng.standard_normal((n, heads[0], head_dim)).astype(np.float16)

pages = -(-(earlier + n) // page_size)
pool = np.zeros((pages, 2, page_size, heads[1], head_dim), np.float16)
pool.reshape(pages, 2, -1)
for token in range(earlier + n):
    pool[token // page_size, :, token % page_size] = k[token], v[token]

wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper("cpu")
last = earlier + n - (pages - 1) * page_size
wrapper.plan(
    np.array([0, pages], np.int32),
    np.arange(pages, dtype=np.int32),
    np.array([last], np.int32),
    *heads,
    head_dim,
    page_size,
    q_len_per_req=n,
)
verified = wrapper.run(q, pool, mask=mask[None])

worst = 0.0
for node in range(n):
    seen = [*range(earlier), *(earlier + i for i in range(n) if mask[node, i])]
    alone = cupyattn.single_decode_with_kv_cache(q[node], k[seen], v[seen])
    worst = max(worst, float(np.abs(verified[node] - alone).max()))
print(f"the tree in one call, and each path alone, differ by at most {worst:.1e}")

# %% [markdown]
# ## What a draft costs
#
# A decode reads the keys once, however many rows look at them: 8 rows of 4 query heads fill a tile
# that one row leaves nearly empty. So verifying 8 tokens should take the time of one.


# %%
def drafts():
    watch = lab.clock()
    one = lab.paged([8192] * 32)
    calls = {"1 token": lab.decode(one)}
    for count in (2, 4, 8, 16):
        batch = lab.paged([8192] * 32, rows=count)
        calls[f"{count}, chain"] = lab.decode(batch, q_len_per_req=count)
        tree = np.eye(count, dtype=bool)
        for row in range(1, count):
            tree[row] |= tree[(row - 1) // 2]
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(lab.DEVICE)
        dtypes = {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
        wrapper.plan(*batch.tables, 32, 8, 128, 16, q_len_per_req=count, **dtypes)
        trees = lab.mask_bits(np.repeat(tree[None], 32, axis=0))
        calls[f"{count}, tree"] = lambda w=wrapper, b=batch, m=trees: w.run(b.q, b.cache, mask=m)
    return {"us": lab.times(calls, watch)}


data = lab.measured("trees", drafts)

# %%
if data:
    fig, axis = plt.subplots(figsize=(5.6, 2.6))
    counts = [1, 2, 4, 8, 16]
    for kind, line in (("chain", "-"), ("tree", "--")):
        us = [data["us"]["1 token"], *(data["us"][f"{count}, {kind}"] for count in counts[1:])]
        axis.plot(counts, us, "o", ls=line, color=lab.OURS, label=kind)
    lab.log2_ticks(axis, counts)
    axis.set_ylim(0)
    axis.set_xlabel("draft tokens of each of 32 requests")
    axis.set_ylabel("µs")
    axis.legend()
    lab.show()

# %% [markdown]
# Beside FlashInfer, 32 requests of 8k keys:

# %%
names = {"1": "q1", "4": "q4", "8": "q8", "4, tree": "q4_tree", "8, tree": "q8_tree"}
print(lab.peers("flashinfer")["on"])
groups = {}
for name, case in names.items():
    row = lab.beside("flashinfer", f"verify_32x8k_{case}")
    who = ("cupyattn", "FlashInfer")
    groups[name] = {w: row[w]["us"] for w in who if w in row}
fig, axis = plt.subplots(figsize=(7.2, 3.0))
lab.bars(axis, groups)
axis.set_xlabel("draft tokens of a request")
axis.set_ylabel("µs")
lab.show()

# %% [markdown]
# **In short.** Up to a tile of rows, drafts are nearly free, and a tree costs what a chain costs.
# A library that takes a tree as a mask over *all* keys pays for reading that mask.
