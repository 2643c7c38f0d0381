"""Benchmarks of cupyattn beside its peers: `python -m benchmarks --help`."""
