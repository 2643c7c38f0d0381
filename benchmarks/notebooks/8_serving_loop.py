# %% [markdown]
# # 8 · A serving loop with CUDA graphs: where the microseconds go
#
# A decode step of a server plans once and attends in every layer. The GPU's part of a layer may be
# 20 µs, and a Python call takes the host 10 to 30. Whoever launches layer by layer from Python may
# wait for the host; a CUDA graph launches all layers at once.

# %%
import time

import numpy as np

import cupyattn
from cupyattn.bench import lab
from cupyattn.bench.lab import plt

lab.begin()
LAYERS, PAGE = 32, 16

# %% [markdown]
# ## The loop
#
# A wrapper in graph mode has buffers of fixed size for its tables. Each step plans, which writes
# the new lengths and pages *in place*, and then replays. The graph itself never changes.

# %%
CODE = """
wrapper = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
wrapper.plan(...)                       # the largest batch
stream.begin_capture()
for layer in model: layer(wrapper)      # projections, append, wrapper.run(q, cache, out=o)
graph = stream.end_capture()
while serving:
    wrapper.plan(indptr, indices, last_page_len, ...)   # host, once a step
    graph.launch(stream)                                # all layers
"""
print(CODE)

# %% [markdown]
# ## Measured
#
# Attention alone, 32 layers, requests of 1k keys. *Eager* calls `run()` for each layer; *graph*
# replays. "Host" is the time until the last launch has returned; "step" is the time until the GPU
# is done. Both begin with a plan.


# %%
def steps():
    import cupy

    def median(step, finish):
        host, whole = [], []
        for _ in range(40):
            finish()
            begin = time.perf_counter()
            step()
            returned = time.perf_counter()
            finish()
            host.append(returned - begin)
            whole.append(time.perf_counter() - begin)
        return 1e6 * float(np.median(host[10:])), 1e6 * float(np.median(whole[10:]))

    found = {}
    stream = cupy.cuda.Stream(non_blocking=True)
    for count in (1, 8, 32, 128):
        with stream:
            batch = lab.paged([1024] * count)
            finish = stream.synchronize
            out = lab.arrays.normal(*batch.q.shape)
            sizes = 32, 8, 128, PAGE
            dtypes = {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
            tables = batch.indptr, lab.host(batch.indices).astype(np.int32), batch.last_page_len
            zeros = [cupy.zeros(len(x), np.int32) for x in tables]
            workspace = cupy.zeros(64 << 20, np.uint8)
            wrapper = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *zeros)
            eager = cupyattn.BatchDecodeWithPagedKVCacheWrapper(lab.DEVICE)

            def plan(w, tables=tables, sizes=sizes, dtypes=dtypes):
                w.plan(*tables, *sizes, **dtypes)

            def layers(w, batch=batch, out=out):
                for _ in range(LAYERS):
                    w.run(batch.q, batch.cache, out=out)

            plan(wrapper)
            plan(eager)
            layers(wrapper)
            layers(eager)
            finish()
            stream.begin_capture()
            layers(wrapper)
            graph = stream.end_capture()

            def step_eager(w=eager, plan=plan, layers=layers):
                plan(w)
                layers(w)

            def step_graph(w=wrapper, plan=plan, graph=graph):
                plan(w)
                graph.launch(stream)

            graph.launch(stream)
            found[count] = {
                "plan": median(lambda w=wrapper, plan=plan: plan(w), finish)[0],
                "eager": median(step_eager, finish),
                "graph": median(step_graph, finish),
                "layers": median(lambda g=graph: g.launch(stream), finish),
            }
    return {"us": found}


data = lab.measured("serving_loop", steps)

# %%
if data:
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.1))
    counts = list(data["us"])
    x = np.arange(len(counts))
    for offset, way in ((-0.2, "eager"), (0.2, "graph")):
        host = np.array([data["us"][c][way][0] for c in counts])
        whole = np.array([data["us"][c][way][1] for c in counts])
        plan = np.array([data["us"][c]["plan"] for c in counts])
        color = lab.OTHER if way == "eager" else lab.OURS
        axes[0].bar(
            x + offset, plan, 0.36, color="#333333", label="plan()" if way == "eager" else None
        )
        axes[0].bar(
            x + offset, host - plan, 0.36, bottom=plan, color=color, label=f"launches, {way}"
        )
        axes[1].bar(x + offset, whole, 0.36, color=color, label=way)
    axes[0].set_title("host")
    axes[1].set_title("step, until the GPU is done")
    axes[0].set_ylabel("µs")
    for axis in axes:
        axis.set_xticks(x, counts)
        axis.set_xlabel("requests")
        axis.grid(axis="x", visible=False)
        axis.set_ylim(0, 1.3 * axis.get_ylim()[1])
        axis.legend(fontsize=7.5, loc="upper left")
    lab.show()

    for count, us in data["us"].items():
        saved = us["eager"][1] - us["graph"][1]
        print(
            f"{count:>4} requests: eager {us['eager'][1]:7.0f} µs, graph {us['graph'][1]:7.0f} µs, "
            f"of which plan {us['plan']:4.0f}; saved {saved:5.0f}"
        )

# %% [markdown]
# An engine also prepares page tables and lengths each step. `cupyattn.serving` does it in one
# launch that reads the engine's own arrays on the GPU, so the graph may contain it too: then
# nothing is left on the host but the replay.

# %% [markdown]
# **In short.** Plan once a step, replay one graph: what is left of the host is the plan. `make
# serve-demo` runs a whole toy engine built this way, with prefix sharing, chunked prompts and
# trees of drafts.
