"""The commands `tiles` and `fit`; what they do is `cupyattn.bench.tiles`, as `cupyattn tune` is."""
