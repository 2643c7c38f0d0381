"""Engines as they are published, run with random weights: programs of their own processes, since an
engine changes what it finds in one. `packages` gets them, `absent` and `ops` stand in for what is
left out, `models` makes a small model and says what it should have answered."""
