# %% [markdown]
# # 5 · Cascade: when sharing pays
#
# Requests often begin alike: a system prompt, a document, a few examples. The pages of that prefix
# stand in the pool once, but a plain decode still *reads* them once for each request. A cascade
# attends to the prefix once, with the query rows of all requests in one tile, and merges each
# row's answer with that over the request's own keys. The merge is exact (notebook 9).

# %%
import numpy as np

import cupyattn
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()

# %% [markdown]
# ## Bytes
#
# $n$ requests that share $s$ keys and have $u$ of their own read $n(s+u)$ keys request by request,
# and $s + nu$ in a cascade. The ratio is the most that sharing can gain, as long as the memory is
# the limit:

# %%
REQUESTS, SHARED, OWN = (4, 16, 64, 256), (512, 2048, 8192, 32768), 256
ratio = np.array([[n * (s + OWN) / (s + n * OWN) for s in SHARED] for n in REQUESTS])


def heatmap(axis, values, title, form="{:.1f}×", top=None):
    axis.imshow(np.log(values), cmap="Reds", vmin=0, vmax=np.log(top or values.max()))
    for i, j in np.ndindex(values.shape):
        dark = np.log(values[i, j]) > 0.6 * np.log(top or values.max())
        text = form.format(values[i, j])
        axis.text(j, i, text, ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(len(SHARED)), [lab.brief(s) for s in SHARED])
    axis.set_yticks(range(len(REQUESTS)), REQUESTS)
    axis.set_xlabel("shared keys")
    axis.set_title(title)
    axis.grid(False)


# %% [markdown]
# ## Two ways to plan the same pages
#
# Every request's table begins with the shared pages. The flat plan takes these tables as they are;
# the cascade takes two levels: one "request" of all rows over the shared pages, and each request
# over its own.


# %%
def tables(n, shared, own, page_size=16):
    """The flat tables, and those of the two levels, of pages 0, 1, 2, ..."""
    first, each = shared // page_size, own // page_size
    prefix = np.arange(first, dtype=np.int32)
    rest = first + np.arange(n * each, dtype=np.int32)
    flat = np.concatenate([np.append(prefix, part) for part in np.split(rest, n)])
    last = np.full(n, page_size, np.int32)
    offsets = np.arange(n + 1, dtype=np.int32)
    one = (offsets * (first + each), flat.astype(np.int32), last)
    two = (
        [np.array([0, n], np.int32), offsets],
        [np.array([0, first], np.int32), offsets * each],
        [prefix, rest],
        [last[:1], last],
    )
    return one, two


def both(n, shared, own, heads=(32, 8), head_dim=128, page_size=16):
    """The call of each plan, over the same pool."""
    one, two = tables(n, shared, own, page_size)
    pool = (shared + n * own) // page_size, page_size, heads[1], head_dim
    q, k, v = lab.arrays.normal(n, heads[0], head_dim), *(lab.arrays.normal(*pool) for _ in "kv")
    dtypes = {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
    flat = cupyattn.BatchDecodeWithPagedKVCacheWrapper(lab.DEVICE)
    flat.plan(*one, *heads, head_dim, page_size, **dtypes)
    cascade = cupyattn.MultiLevelCascadeAttentionWrapper(2, lab.DEVICE, "NHD")
    cascade.plan(*two, *heads, head_dim, page_size, **dtypes)
    return {"flat": lambda: flat.run(q, (k, v)), "cascade": lambda: cascade.run(q, (k, v))}


small = both(3, 64, 32, heads=(8, 2), head_dim=64)
difference = np.abs(lab.host(small["flat"]()) - lab.host(small["cascade"]())).max()
print(f"flat and cascade differ by at most {difference:.1e}, in bfloat16")

# %% [markdown]
# ## Measured


# %%
def grid():
    watch = lab.clock()
    found = {}
    for n in REQUESTS:
        for shared in SHARED:
            found[f"{n} {shared}"] = lab.times(both(n, shared, OWN), watch, rounds=5)
    return {"us": found}


data = lab.measured("cascade", grid)
panels = [(ratio, "bytes, flat over cascade", "{:.1f}×")]
if data:
    us = data["us"]
    gain = [[us[f"{n} {s}"]["flat"] / us[f"{n} {s}"]["cascade"] for s in SHARED] for n in REQUESTS]
    panels.append((np.array(gain), "time, flat over cascade", "{:.2f}×"))
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.3), sharey=True)
for axis, (values, title, form) in zip(axes, panels, strict=False):
    heatmap(axis, values, title, form, top=ratio.max())
axes[1].set_visible(len(panels) > 1)
axes[0].set_ylabel("requests, 256 keys of their own")
lab.show()

# %% [markdown]
# Time gains less than bytes, for two reasons. The L2 cache serves a flat decode too: requests that
# run together read the same pages. And with many rows the shared part is no longer bound by memory
# but by the matrix units. Where a cascade would lose, `plan()` estimates so and plans flat
# instead.
#
# ## Beside others
#
# "One launch each" attends request by request:

# %%
names = {"64 share 8k": "cascade_64x8k_256", "256 share 32k": "cascade_256x32k_256"}
names |= {"16 share 2k, 512 own": "cascade_16x2k_512"}
print(lab.peers("flashinfer")["on"])
fig, axis = plt.subplots(figsize=(7.2, 3.0))
groups = {}
for name, case in names.items():
    row = lab.beside("flashinfer", case)
    groups[name] = {"cupyattn": row["cupyattn"]["us"], "FlashInfer": row["FlashInfer"]["us"]}
    groups[name]["one launch each"] = row["cupyattn, apart"]["us"]
lab.bars(axis, groups)
axis.set_yscale("log")
axis.set_yticks([30, 100, 300, 1000, 3000], ["30", "100", "300", "1,000", "3,000"])
axis.minorticks_off()
axis.set_ylabel("µs")
lab.show()

# %% [markdown]
# **In short.** Sharing pays when many rows meet a long prefix: 64 requests over 8k shared keys
# take a fifth of the time. Levels may be many: a system prompt, a document, a branch.
