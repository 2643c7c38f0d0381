"""Speculative decoding end to end, with a small model of random weights: what greedy decoding says
with drafts, of chains and of trees, is what it says without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn.serving import (
    AttentionBackend,
    BackendConfig,
    BatchInfo,
    DraftInfo,
    ForwardMode,
    LayerSpec,
    MHATokenToKVPool,
)

WORDS, WIDTH, HEADS, KV_HEADS, DIM, LAYERS, COLUMNS = 23, 24, 4, 2, 8, 2, 96
NUM_TOKENS, DRAFTS = 24, 6
# The parent of each draft; of a tree those behind the first branch off earlier ones.
CHAIN, TREE = (-1, 0, 1, 2, 3, 4), (-1, 0, 0, 1, 1, 2)


class Model:
    """Two layers of attention with a window in one of them, over a paged pool."""

    def __init__(self, page_size: int, parents: tuple[int, ...]) -> None:
        rng = np.random.default_rng(8)
        self.embed = rng.standard_normal((WORDS, WIDTH))
        self.place = 0.3 * rng.standard_normal((COLUMNS, WIDTH))
        dims = HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM
        self.weights = [
            [rng.standard_normal((WIDTH, d)) / 4 for d in dims]
            + [rng.standard_normal((HEADS * DIM, WIDTH)) / 4]
            for _ in range(LAYERS)
        ]
        self.layers = LayerSpec(0), LayerSpec(1, window_size=(5, 0))
        self.parents = parents
        self.is_tree = parents != CHAIN
        table = np.random.default_rng(2).permutation(3 * COLUMNS // page_size)
        slots = table.reshape(3, -1, 1) * page_size + np.arange(page_size)
        self.table = slots.reshape(3, COLUMNS).astype(np.int32)
        config = BackendConfig(
            *(HEADS, KV_HEADS, DIM), page_size=page_size, max_context_len=COLUMNS,
            q_dtype="float32", sliding_window_size=5, num_draft_tokens=DRAFTS,
            topk=2 if self.is_tree else 1,
        )  # fmt: skip
        self.pool = MHATokenToKVPool(
            3 * COLUMNS, KV_HEADS, DIM, LAYERS, self.table, dtype="float32"
        )
        for layer in range(LAYERS):
            for x in self.pool.get_kv_buffer(layer):
                x[...] = np.nan
        self.backend = AttentionBackend(config, self.pool, self.table)

    def step(
        self, mode: ForwardMode, rows: Any, lens: Any, tokens: Any, places: Any, **more: Any
    ) -> np.ndarray:
        """The next word after each token. places: (row, column, position) of each."""
        row, column, position = np.array(places).T
        batch = BatchInfo(mode, np.array(rows), np.array(lens), np.array(lens), **more)
        self.backend.init_forward_metadata(batch)
        x = self.embed[tokens] + self.place[position]
        for layer, (w_q, w_k, w_v, w_o) in zip(self.layers, self.weights, strict=True):
            q, k, v = ((x @ w).reshape(len(x), -1, DIM).astype(np.float32) for w in (w_q, w_k, w_v))
            self.backend.write_kv(layer, self.table[row, column], k, v)
            x = x + self.backend.forward(q, layer).reshape(len(x), -1) @ w_o
        return (x @ self.embed.T).argmax(-1)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        lens = [len(p) for p in prompts]
        places = [(b, i, i) for b, n in enumerate(lens) for i in range(n)]
        words = self.step(
            *(ForwardMode.EXTEND, range(len(prompts)), lens, np.concatenate(prompts), places),
            extend_seq_lens_host=np.array(lens),
        )
        return [int(words[end - 1]) for end in np.cumsum(lens)]


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2]]


def plain(page_size: int) -> list[list[int]]:
    """Greedy decoding, a token a step."""
    model = Model(page_size, CHAIN)
    texts = [[word] for word in model.prefill(PROMPTS)]
    lens = [len(p) for p in PROMPTS]
    while len(texts[0]) < NUM_TOKENS:
        lens = [n + 1 for n in lens]
        places = [(b, n - 1, n - 1) for b, n in enumerate(lens)]
        last = [text[-1] for text in texts]
        words = model.step(ForwardMode.DECODE, range(3), lens, last, places)
        for text, word in zip(texts, words, strict=True):
            text.append(int(word))
    return texts


def guess(rng: np.random.Generator, known: list[int], done: int, depth: int) -> int:
    """A draft: often what decoding will say, so that some are accepted and some are not."""
    at = done + depth
    return known[at] if at < len(known) and rng.random() < 0.7 else int(rng.integers(WORDS))


def speculative(page_size: int, parents: tuple[int, ...], known: list[list[int]]) -> Any:
    """The same with drafts; also how many tokens a verification gave."""
    rng, model = np.random.default_rng(5), Model(page_size, parents)
    texts = [[word] for word in model.prefill(PROMPTS)]
    lens, num_steps = [len(p) for p in PROMPTS], 0
    depth = [0] * DRAFTS
    seen = np.eye(DRAFTS, dtype=bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            depth[token] = depth[parent] + 1
            seen[token] |= seen[parent]
    while min(map(len, texts)) < NUM_TOKENS:
        num_steps += 1
        # The first draft is the last word, whose keys are not there yet.
        drafts = [
            [text[-1]] + [guess(rng, known[b], len(text), depth[i] - 1) for i in range(1, DRAFTS)]
            for b, text in enumerate(texts)
        ]
        places = [(b, n + i, n + depth[i]) for b, n in enumerate(lens) for i in range(DRAFTS)]
        words = model.step(
            *(ForwardMode.TARGET_VERIFY, range(3), lens, np.concatenate(drafts), places),
            draft=DraftInfo(tree_mask=np.stack([seen] * 3)),
        ).reshape(3, DRAFTS)
        for b, text in enumerate(texts):
            path = [0]
            while True:
                text.append(int(words[b, path[-1]]))
                children = [i for i in range(DRAFTS) if parents[i] == path[-1]]
                right = [i for i in children if drafts[b][i] == text[-1]]
                if not right:
                    break
                path.append(right[0])
            # Accepted tokens move up to the columns that they have from now on.
            old, new = (model.table[b, lens[b] + np.array(x)] for x in (path, range(len(path))))
            for layer in range(LAYERS):
                for x in model.pool.get_kv_buffer(layer):
                    x[new] = x[old].copy()
            lens[b] += len(path)
    return [text[:NUM_TOKENS] for text in texts], num_steps


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_change_nothing(page_size: int, parents: tuple[int, ...]) -> None:
    wanted = plain(page_size)
    found, num_steps = speculative(page_size, parents, wanted)
    assert found == wanted
    # Some drafts were accepted and some were not.
    assert NUM_TOKENS / DRAFTS < num_steps < NUM_TOKENS - 4
    assert len({word for text in wanted for word in text}) > 3
