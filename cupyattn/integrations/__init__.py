"""Integrations into frameworks and engines. Each module imports the one that it is for, and none of
them is needed by the rest of the library:

torch         torch.ops.cupyattn.*, and calls inside torch.compile's graphs
transformers  attn_implementation="cupyattn" in transformers' models
jax           calls inside jax.jit
minisgl       attention_backend="cupyattn" in mini-sglang
sglang        --attention-backend cupyattn, as a plug-in
vllm          --attention-backend CUSTOM and CUPYATTN_MLA, as a plug-in
"""
