"""Attention over several GPUs, beside one of them: `python -m benchmarks distributed`."""
