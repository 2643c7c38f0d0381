"""Decode over a cache that is spread over all devices of this process, with JAX alone.

    python examples/context_parallel_jax.py                  # all GPUs
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 python examples/context_parallel_jax.py

Pages of a request are dealt to the devices in turn. Every device attends with all query heads to
the pages that it has, and `exchange_states` makes of their states those of a device's own heads
over all keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cupyattn.integrations.jax import exchange_states, trtllm_batch_decode_with_kv_cache

BATCH, PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 4, 512, 16, 32, 8, 128
SCALE = DIM**-0.5


def attend(q, pages, table, lens, dtype):
    """Answers and LSE (base 2) over the first `lens` tokens of the pages in `table`."""
    return trtllm_batch_decode_with_kv_cache(
        q, pages, None, table, lens, PAGES * PAGE_SIZE, SCALE, out_dtype=dtype, return_lse=True
    )


def main() -> None:
    devices = jax.devices()
    size, own_pages = len(devices), PAGES // len(devices)
    mesh = Mesh(devices, ("keys",))
    seeds = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(seeds[0], (BATCH, HEADS, DIM), jnp.bfloat16)
    # Page p of a request is page p // size of device p % size.
    shape = BATCH, own_pages, size, 2, KV_HEADS, PAGE_SIZE, DIM
    pages = jax.random.normal(seeds[1], shape, jnp.bfloat16)
    lens = jnp.array([PAGES * PAGE_SIZE, 4000, 17, 1], jnp.int32)

    def step(q, pages, lens):
        begin = jax.lax.axis_index("keys") * PAGE_SIZE  # of this device's part of a round of pages
        rounds, rest = jnp.divmod(lens, size * PAGE_SIZE)
        own_lens = rounds * PAGE_SIZE + jnp.clip(rest - begin, 0, PAGE_SIZE)
        table = jnp.arange(BATCH * own_pages, dtype=jnp.int32).reshape(BATCH, own_pages)
        own = attend(q, pages.reshape(-1, *pages.shape[3:]), table, own_lens, "float32")
        return exchange_states(*own, "keys", out_dtype=q.dtype)[0]

    everywhere, by_pages, by_heads = P(), P(None, None, "keys"), P(None, "keys")
    step = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(everywhere, by_pages, everywhere),
        out_specs=by_heads,
        check_vma=False,
    )
    spread = jax.device_put(pages, NamedSharding(mesh, by_pages))
    out = jax.device_get(jax.jit(step)(q, spread, lens))

    table = jnp.arange(BATCH * own_pages * size, dtype=jnp.int32).reshape(BATCH, -1)
    whole = pages.reshape(-1, *shape[3:])
    alone, _ = jax.jit(attend, static_argnums=4)(q, whole, table, lens, "bfloat16")
    off = abs(out.astype("float32") - jax.device_get(alone).astype("float32")).max()
    print(f"{size} devices: answers {out.shape}, at most {off:.4f} from those of one device")
    assert off < 0.03


if __name__ == "__main__":
    main()
