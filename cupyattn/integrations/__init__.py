"""Doors for frameworks and engines. Each module imports the one that it is for, and none of them is
needed by the rest of the library:

torch         torch.ops.cupyattn.*, and calls inside torch.compile's graphs
transformers  attn_implementation="cupyattn" in transformers' models
jax           calls inside jax.jit
"""
