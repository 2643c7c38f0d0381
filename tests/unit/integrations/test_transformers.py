"""Models with attn_implementation="cupyattn": logits and tokens of eager attention."""

from __future__ import annotations

import copy
import math
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from helpers import model_families  # noqa: E402
from helpers.model_families import FAMILIES  # noqa: E402
from helpers.tiny_models import KINDS, little_memory, pair  # noqa: E402

import cupyattn.integrations.transformers as door  # noqa: E402
from cupyattn.errors import ArgumentError, UnsupportedError  # noqa: E402

LENGTH = 12


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    door.register()
    door.register()


@pytest.fixture(params=KINDS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair(transformers, torch, request.param)


def tokens(*padding: int, is_left: bool = True) -> tuple[Any, Any]:
    """(ids, mask) of requests with so many tokens of padding."""
    ids = torch.randint(2, 97, (len(padding), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, n in enumerate(padding):
        where = slice(0, n) if is_left else slice(LENGTH - n, None)
        ids[row, where], mask[row, where] = 0, 0
    return ids, mask


@torch.no_grad()
def check(models: tuple[Any, Any], ids: Any, mask: Any, **named: Any) -> None:
    """Equal logits where there is a token."""
    logits = [m(input_ids=ids, attention_mask=mask, **named).logits for m in models]
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask > 0
    torch.testing.assert_close(logits[1][seen], logits[0][seen], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("padding", [None, (0,), (0, 0), (0, 5), (3, 11)])
def test_prompts(models: tuple[Any, Any], padding: Any) -> None:
    ids, mask = tokens(*(padding or (0, 0)))
    check(models, ids, None if padding is None else mask)


def test_prompts_padded_behind(models: tuple[Any, Any]) -> None:
    check(models, *tokens(0, 4, is_left=False))


def test_a_mask_with_holes(models: tuple[Any, Any]) -> None:
    ids, mask = tokens(0, 2)
    mask[0, 4], mask[1, 7] = 0, 0
    check(models, ids, mask)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [(0,), (0, 5)])
def test_generate(models: tuple[Any, Any], cache: str, padding: Any) -> None:
    """Over the window's end; transformers compiles nothing on a CPU."""
    ids, mask = tokens(*padding)
    named: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    if cache == "static":
        named["cache_implementation"] = "static"
    made = [
        m.generate(ids, attention_mask=mask, return_dict_in_generate=True, **named) for m in models
    ]
    for eager, ours in zip(*(x.logits for x in made), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=2e-4)
    assert torch.equal(made[0].sequences, made[1].sequences)


def test_packed_sequences() -> None:
    """Positions that begin anew, without a mask: sequences do not see each other."""
    models = pair(transformers, torch, "llama")
    ids, _ = tokens(0)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    with torch.no_grad():
        logits = [m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in models]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=2e-4)


def test_a_mask_of_the_users() -> None:
    models = pair(transformers, torch, "llama")
    ids, _ = tokens(0, 0)
    seen = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        eager = models[0](input_ids=ids, attention_mask=added).logits
        torch.testing.assert_close(
            models[1](input_ids=ids, attention_mask=seen).logits, eager, rtol=1e-4, atol=2e-4
        )
        for mask in (added, added.expand(-1, 4, -1, -1), added[:1].expand(2, -1, -1, -1)):
            want = models[0](input_ids=ids, attention_mask=mask).logits
            got = models[1](input_ids=ids, attention_mask=mask).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)
        with pytest.raises(UnsupportedError, match=r"attention_mask: dtype is torch\.int64"):
            models[1](input_ids=ids, attention_mask=seen.long())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("low", [None, -1e9, -math.inf])
def test_rows_whose_keys_all_are_hidden_by_numbers(dtype: str, low: Any) -> None:
    """Padding's own rows: 0, as beside a bool mask. Kernels have no digits for such logits."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    low = torch.finfo(kind).min if low is None else max(low, torch.finfo(kind).min)
    q, k = torch.randn(2, 4, 5, 16).to(kind), torch.randn(2, 2, 5, 16).to(kind)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[1, :, :, :2] = False
    module = types.SimpleNamespace(is_causal=True)
    added = torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, low)
    want, _ = door.attention(module, q, k, k, seen)
    got, _ = door.attention(module, q, k, k, added)
    assert not want[1, :2].any()
    torch.testing.assert_close(got, want)
    biased, _ = door.attention(module, q, k, k, seen, position_bias=torch.zeros_like(added))
    torch.testing.assert_close(biased, want)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_compiled_model_has_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    eager, ours = pair(transformers, torch, kind)
    ids, mask = tokens(0, 5)
    compiled = torch.compile(ours.model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for given in (None, mask):
            named = {"input_ids": ids, "attention_mask": given, "use_cache": False}
            want, got = (m(**named).last_hidden_state for m in (eager.model, compiled))
            seen = torch.ones_like(ids) > 0 if given is None else mask > 0
            torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=2e-4)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_static_cache_in_a_compiled_step() -> None:
    """A step of decoding as transformers compiles it on a GPU."""
    torch._dynamo.reset()
    models = pair(transformers, torch, "gemma3")
    answers = []
    for model in models:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        step = model if model is models[0] else torch.compile(model, backend="eager",
                                                              fullgraph=True)  # fmt: skip
        ids, _ = tokens(0, 0)
        with torch.no_grad():
            logits = [model(input_ids=ids, past_key_values=cache).logits[:, -1]]
            for token in (5, 9, 13):
                one = torch.full((2, 1), token)
                logits.append(step(input_ids=one, past_key_values=cache).logits[:, -1])
        answers.append(torch.stack(logits))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=2e-4)


class Cache:
    """What paged attention takes of continuous batching's cache: rows of one layer, in blocks."""

    block_size, num_key_value_heads, head_dim = 4, 2, 16
    layer_index_to_group_indices = ((0, 0),)

    def __init__(self) -> None:
        self.key_cache = [torch.randn(24, 2, 16)]
        self.value_cache = [torch.randn(24, 2, 16)]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, read_index: Any,
               write_index: Any) -> Any:  # fmt: skip
        for pool, new in ((self.key_cache, key_states), (self.value_cache, value_states)):
            pool[layer_idx][write_index[0]] = new.transpose(1, 2)[0]
        return self.key_cache[layer_idx][read_index[0]], self.value_cache[layer_idx][read_index[0]]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_dict", [False, True])
def test_paged_attention_of_blocks_and_of_rows(window: Any, is_dict: bool) -> None:
    """The same step by gathered rows and by block tables, after eager attention."""
    module = types.SimpleNamespace(layer_idx=0, scaling=0.3, sliding_window=window)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16)
    rows = torch.tensor([8, 9, 10, 11, 0, 4, 5, 6, 7, 12, 13])  # 5 keys and 6
    write, cu_q = torch.tensor([0, 13]), torch.tensor([0, 1, 2], dtype=torch.int32)
    cu_k: Any = torch.tensor([0, 5, 11], dtype=torch.int32)
    most: Any = 6
    if is_dict:
        kind = "sliding_attention" if window else "full_attention"
        cu_k, most = {kind: cu_k}, {kind: most}
    table = torch.tensor([[[2, 0, -1], [1, 3, -1]]], dtype=torch.int32)
    first, second = Cache(), Cache()
    second.key_cache[0].copy_(first.key_cache[0])
    second.value_cache[0].copy_(first.value_cache[0])
    named = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "max_seqlen_q": 1, "max_seqlen_k": most,
             "softcap": 1.5, "s_aux": torch.zeros(4)}  # fmt: skip
    gathered, _ = door.paged_attention(
        module, q, k, v, None, cache=first, read_index=[rows], write_index=[write], **named
    )
    blocks, _ = door.paged_attention(
        module, q, k, v, None, cache=second, block_table=table, **named
    )
    torch.testing.assert_close(blocks, gathered)
    torch.testing.assert_close(first.key_cache[0], second.key_cache[0])
    keys, values = first.key_cache[0][rows[5:]], first.value_cache[0][rows[5:]]
    low = 0 if window is None else 6 - window
    scores = 1.5 * torch.tanh((keys[low:, 1] @ q[0, 3, 1]) * 0.3 / 1.5)
    weights = torch.softmax(torch.cat([scores, torch.zeros(1)]), 0)[:-1]
    torch.testing.assert_close(gathered[1, 3], weights @ values[low:, 1])


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.filterwarnings("ignore:The `paged. prefix:FutureWarning")
def test_continuous_batching(kind: str) -> None:
    """Prompts of several lengths in one batch, by all names, give the tokens of each alone."""
    pytest.importorskip("psutil", reason="transformers sizes its cache by it on a CPU")
    eager, ours = pair(transformers, torch, kind)
    prompts = [[5, 9, 13, 40, 7], [6, 3], [*range(2, 40)]]
    named = {"max_new_tokens": 5, "do_sample": False}
    want = [eager.generate(torch.tensor([p]), **named)[0, len(p) :].tolist() for p in prompts]
    config = transformers.GenerationConfig(eos_token_id=-1, pad_token_id=0, **named)
    small = little_memory(transformers, num_blocks=64, max_batch_tokens=64)
    names = door.NAME, f"paged|{door.NAME}", door.FLASH_NAME
    for name in names if kind == "llama" else names[:1]:
        ours.set_attn_implementation(name)
        before = ours.config._attn_implementation
        made = ours.generate_batch(prompts, generation_config=config, **small)
        assert [list(x.generated_tokens) for x in made.values()] == want
        assert ours.config._attn_implementation == before


def test_an_installed_flash_attn_does_not_take_our_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would take it for any model whose name of attention has no "flash"."""
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    _, ours = pair(transformers, torch, "llama")
    manager = types.SimpleNamespace(_original_attn_impl=None)
    continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn(manager, ours)
    assert ours.config._attn_implementation.removeprefix("paged|") == door.FLASH_NAME
    assert manager._original_attn_impl == door.NAME
    eager, _ = pair(transformers, torch, "llama")
    monkeypatch.setattr(eager, "set_attn_implementation", lambda name: None)
    manager = types.SimpleNamespace(_original_attn_impl=None)
    continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn(manager, eager)
    assert manager._original_attn_impl == "eager"


def test_the_flash_path_finds_our_functions() -> None:
    from transformers import modeling_flash_attention_utils as utils
    from transformers.utils.generic import is_flash_attention_requested

    from cupyattn import flash_attn

    found = utils._lazy_imports(f"paged|{door.FLASH_NAME}")
    assert found[1:3] == (flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache)
    assert is_flash_attention_requested(requested_attention_implementation=door.FLASH_NAME,
                                        version=[2, 3])  # fmt: skip
    eager, ours = pair(transformers, torch, "qwen3", door.FLASH_NAME)
    check((eager, ours), *tokens(0, 5))


def test_what_is_refused() -> None:
    _, ours = pair(transformers, torch, "llama")
    ids, _ = tokens(0)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="output_attentions"):
        ours(input_ids=ids, output_attentions=True)
    with pytest.raises(ArgumentError, match="requires grad, and cupyattn has no backward pass"):
        ours(input_ids=ids)
    q = torch.zeros(1, 4, 2, 16)
    module = types.SimpleNamespace(is_causal=True)
    with pytest.raises(UnsupportedError, match=r"dropout: got 0\.1"):
        door.attention(module, q, q, q, None, dropout=0.1)
    with pytest.raises(UnsupportedError, match=r"cache: .* is for continuous batching"):
        door.paged_attention(module, q, q, q)
    for name in ("indices", "block_indices"):
        with pytest.raises(UnsupportedError, match=f"^{name}: the model chooses keys"):
            door.attention(module, q, q, q, None, **{name: torch.zeros(1, 2, 1)})


# --- which models ---


def _tiny(config: str, **more: Any) -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return getattr(transformers, config)(**(sizes | {"intermediate_size": 48} | more))


NOT_OF_THE_INTERFACE = [
    ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    ("MPNetConfig", "MPNetModel", {}),
    ("RoFormerConfig", "RoFormerModel", {}),
    ("XGLMConfig", "XGLMModel", {"d_model": 32, "ffn_dim": 48, "num_layers": 2}),
    ("TrOCRConfig", "TrOCRForCausalLM", {"d_model": 32, "decoder_layers": 1}),
    ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 1}),
    ("ImageGPTConfig", "ImageGPTModel", {"n_embd": 32, "n_layer": 1, "n_head": 4}),
    ("FalconConfig", "FalconModel", {}),
]


@pytest.mark.filterwarnings("ignore:The `paged. prefix:FutureWarning")
@pytest.mark.parametrize("config, model, more", NOT_OF_THE_INTERFACE)
def test_models_with_attention_of_their_own_are_refused(config: str, model: str, more: Any) -> None:
    """As they refuse "sdpa": when made, from a config by the Auto classes, and when told later."""
    made = _tiny(config, **more)
    for name in (door.NAME, door.FLASH_NAME, f"paged|{door.NAME}"):
        made._attn_implementation = name
        with pytest.raises(ValueError, match=rf"{model} does not support attn_implementation="):
            getattr(transformers, model)(made)
    made._attn_implementation = "eager"
    eager = getattr(transformers, model)(made)
    with pytest.raises(ValueError, match=r"does not support attn_implementation="):
        eager.get_correct_attn_implementation(door.NAME)
    assert eager.config._attn_implementation == "eager"
    eager.set_attn_implementation(door.NAME)  # transformers warns of such a model, and does nothing
    assert eager.config._attn_implementation == "eager"


def test_auto_classes_refuse(tmp_path: Any) -> None:
    config = _tiny("MPNetConfig")
    with pytest.raises(ValueError, match="MPNetModel does not support"):
        transformers.AutoModel.from_config(config, attn_implementation=door.NAME)
    transformers.MPNetModel(_tiny("MPNetConfig")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MPNetModel does not support"):
        transformers.AutoModel.from_pretrained(tmp_path, attn_implementation=door.NAME)


def test_a_part_that_is_refused() -> None:
    """Parts are asked one by one; a dict names those that are to have our attention."""
    encoder, decoder = _tiny("ViTConfig", image_size=16, patch_size=8), _tiny("TrOCRConfig")
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config._attn_implementation = door.NAME
    with pytest.raises(ValueError, match="TrOCRForCausalLM does not support"):
        transformers.VisionEncoderDecoderModel(config=config)
    config._attn_implementation = {"encoder": door.NAME, "decoder": "eager"}
    model = transformers.VisionEncoderDecoderModel(config=config)
    assert model.encoder.config._attn_implementation == door.NAME
    assert model.decoder.config._attn_implementation == "eager"


def test_models_for_kernels_with_sinks_keep_our_name() -> None:
    """transformers would take another kernel where it finds "flash" in a name."""
    _, ours = pair(transformers, torch, "gpt_oss")
    listed = type(ours)._compatible_flash_implementations
    ours.set_attn_implementation(door.FLASH_NAME)
    assert ours.config._attn_implementation == door.FLASH_NAME
    assert ours._compatible_flash_implementations == listed


# --- what models ask for beside rows and keys ---


def _compare(eager: Any, name: str = door.NAME, **given: Any) -> None:
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(name)
    with torch.no_grad():
        want, got = eager(**given)[0], ours(**given)[0]
    seen = given.get("attention_mask")
    if seen is not None and want.shape[:2] == seen.shape:
        want, got = want[seen > 0], got[seen > 0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def _eager(config: Any, model: str) -> Any:
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2.0)
    return made


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_autocast(kind: str) -> None:
    """q and k in float32, v in bfloat16: computed in autocast's dtype, as SDPA's."""
    eager, ours = pair(transformers, torch, kind)
    ids, mask = tokens(0, 5)
    with torch.no_grad():
        exact = eager(input_ids=ids, attention_mask=mask).logits[mask > 0]
        with torch.autocast("cpu", torch.bfloat16):
            want, got = (m(input_ids=ids, attention_mask=mask).logits[mask > 0].float()
                         for m in (eager, ours))  # fmt: skip
            tokens_made = ours.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert tokens_made.shape == (2, LENGTH + 4)
    assert (got - exact).norm() <= 1.5 * (want - exact).norm()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_arrays_of_several_dtypes(dtype: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    small = getattr(torch, dtype)
    module = types.SimpleNamespace(is_causal=True)
    want, _ = door.attention(module, *(x.to(small) for x in (q, k, v)), None)
    got, _ = door.attention(module, q, k, v.to(small), None)
    assert got.dtype == small
    torch.testing.assert_close(got, want)


def test_position_biases() -> None:
    """T5's: of rows and keys, beside padding, causality and a cache."""
    family = FAMILIES["t5, position biases"]
    eager, ours = model_families.pair(family, transformers, torch)
    given = family.inputs(torch, 4, is_left=False)
    want, got = (model_families.answers(m, torch, given) for m in (eager, ours))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=5e-4)
    del given["decoder_input_ids"]
    for named in ({}, {"cache_implementation": "static"}):
        made = [m.generate(**given, max_new_tokens=6, do_sample=False, **named)
                for m in (eager, ours)]  # fmt: skip
        assert torch.equal(*made)


def test_rows_that_are_causal_in_layers_that_are_not() -> None:
    """A model may make causal masks for layers that say they see both sides."""
    config = _tiny("GemmaConfig", num_key_value_heads=2, head_dim=16)
    eager = _eager(config, "GemmaModel")
    for layer in eager.layers:
        layer.self_attn.is_causal = False
    eager.config.use_bidirectional_attention = True
    ids, mask = tokens(0, 5)
    _compare(eager, input_ids=ids, attention_mask=mask)
    _compare(eager, input_ids=ids)


def test_a_model_that_reads_its_mask() -> None:
    """allow_is_causal_skip=False: it computes with the mask, which has to be one."""
    made = door.attention_mask(2, 5, 5, allow_is_causal_skip=False)
    assert torch.equal(made, torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5))


# --- a step of decoding ---


@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (3, 1.5)])
def test_a_padded_step_over_a_dynamic_cache(window: Any, softcap: Any) -> None:
    """Each KV head as a request; beside the requests as they are."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, *shape) for shape in ((8, 1, 16), (2, 11, 16), (2, 11, 24)))
    module = types.SimpleNamespace(is_causal=True)
    seen = torch.ones(3, 11, dtype=torch.bool)
    seen[1, :4], seen[2, :10] = False, False
    mask = door.attention_mask(3, 1, 11, 10, attention_mask=seen)
    named = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    got, _ = door.attention(module, q, k, v, mask, **named)
    assert len(mask.cupyattn_lengths) == 4
    want, _ = door.attention(module, q, k, v, mask.clone(), **named)
    torch.testing.assert_close(got, want)
    own, _ = door.attention(module, q[1:2], k[1:2, :, 4:], v[1:2, :, 4:], None, **named)
    torch.testing.assert_close(got[1:2], own)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (None, 1.5), (6, 1.5)])
def test_a_step_over_a_dynamic_cache(
    count: int, has_sinks: bool, window: Any, softcap: Any
) -> None:
    """One row of each request over keys of one length, as one request of all heads."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(count, 8, 1, 16),
        torch.randn(count, 2, 11, 16),
        torch.randn(count, 2, 11, 24),
    )
    module = types.SimpleNamespace(is_causal=True)
    sinks = torch.randn(8) if has_sinks else None
    named = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    got, _ = door.attention(module, q, k, v, None, **named)
    scores = 0.3 * q @ k.repeat_interleave(4, 1).transpose(2, 3)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[..., : 11 - window] = -torch.inf
    if has_sinks:
        scores = torch.cat([scores, sinks.view(1, 8, 1, 1).expand(count, -1, -1, -1)], -1)
    want = torch.softmax(scores, -1)[..., :11] @ v.repeat_interleave(4, 1)
    torch.testing.assert_close(got, want.transpose(1, 2))
    # Heads that are not equally far apart: part of a larger cache.
    room = torch.zeros(count, 3, 11, 16)
    room[:, :2] = k
    part, _ = door.attention(module, q, room[:, :2], v, None, **named)
    torch.testing.assert_close(part, got)
