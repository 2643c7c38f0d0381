# %% [markdown]
# # 1 · The first call, from NumPy, torch and JAX
#
# `dot_product_attention` has the names and the layout of `jax.nn.dot_product_attention`:
#
# $$ o = \mathrm{softmax}\left(\frac{q\,k^\top}{\sqrt{D}}\right) v $$
#
# It takes arrays of any framework that speaks DLPack, on any device, and answers in the framework
# of `q`. Arrays on a GPU are attended to by CUDA kernels, arrays on the CPU by a reference in
# NumPy that computes in float64.

# %%
import importlib.util
import os
import time

import numpy as np

import cupyattn
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX takes most of a GPU at once

# %% [markdown]
# ## One call, three frameworks
#
# Two requests, 16 new tokens each behind 32 older ones, 8 query heads that share 2 key heads
# (GQA). `is_causal` aligns rows to the *last* key: the last row sees all 48 keys, the one before
# it 47.

# %%
rng = np.random.default_rng(0)
q = rng.standard_normal((2, 16, 8, 64)).astype(np.float16)  # [requests, tokens, heads, head dim]
k, v = rng.standard_normal((2, 2, 48, 2, 64)).astype(np.float16)

answers = {"NumPy": cupyattn.dot_product_attention(q, k, v, is_causal=True)}

if importlib.util.find_spec("torch"):
    import torch

    device = "cuda" if lab.GPU and torch.cuda.is_available() else "cpu"
    tensors = [torch.from_numpy(x).to(device) for x in (q, k, v)]
    answers["torch"] = cupyattn.dot_product_attention(*tensors, is_causal=True)

if importlib.util.find_spec("jax"):
    import jax

    answers["JAX"] = cupyattn.dot_product_attention(
        *(jax.numpy.asarray(x) for x in (q, k, v)), is_causal=True
    )

if lab.GPU:
    import cupy

    answers["CuPy"] = cupyattn.dot_product_attention(
        *(cupy.asarray(x) for x in (q, k, v)), is_causal=True
    )

for name, o in answers.items():
    difference = np.abs(lab.host(o) - lab.host(answers["NumPy"])).max()
    kind = f"{type(o).__module__}.{type(o).__name__}"
    print(f"{name:6} {kind:24} largest difference {difference:.1e}")

# %% [markdown]
# ## What a row sees
#
# If the values are the rows of an identity matrix, the answer *is* the row of probabilities. So
# the library can draw its own masks: causality, a window of 16 keys, and 24 rows at the end of 64
# keys.

# %%
keys = 64
q1, k1 = rng.standard_normal((2, keys, 1, 64)).astype(np.float16)
identity = np.eye(keys, dtype=np.float16)[:, None]

pictures = {
    "causal": cupyattn.single_prefill_with_kv_cache(q1, k1, identity, causal=True),
    "window of 16": cupyattn.single_prefill_with_kv_cache(
        q1, k1, identity, causal=True, window_left=15
    ),
    "causal, 24 rows at the end": cupyattn.single_prefill_with_kv_cache(
        q1[-24:], k1, identity, causal=True
    ),
}
fig, axes = plt.subplots(1, 3, figsize=(7.6, 2.7), width_ratios=[1, 1, 1])
for axis, (title, p) in zip(axes, pictures.items(), strict=True):
    axis.imshow(np.sqrt(p[:, 0].astype(np.float32)), cmap="Reds", aspect="equal")
    axis.set_title(title)
    axis.set_xlabel("key")
    axis.grid(False)
axes[0].set_ylabel("query row")
lab.show()

# %% [markdown]
# ## What the first call costs
#
# Kernels are CUDA sources. NVRTC compiles one when a call first needs it and keeps it in a cache
# on disk; later processes only load it. After that a call is a check of its arguments and a
# launch.


# %%
def first_calls():
    q, k, v = (lab.arrays.normal(*shape) for shape in ((32, 128), (4096, 8, 128), (4096, 8, 128)))
    seconds = []
    for _ in range(400):
        start = time.perf_counter()
        cupyattn.single_decode_with_kv_cache(q, k, v)
        seconds.append(time.perf_counter() - start)
    lab.clock().wait()
    return {"first_ms": 1e3 * seconds[0], "next_us": 1e6 * float(np.median(seconds[200:]))}


data = lab.measured("first_call", first_calls)
if data:
    print(f"first call in a process  {data['first_ms']:8.1f} ms  (loads the kernel)")
    print(f"every later call         {data['next_us']:8.1f} µs  of the host")

# %% [markdown]
# **In short.** One function, the layout you know, the framework you have. The next notebook asks
# how fast a decode can be at all.
