"""Nine notebooks: `python -m benchmarks.notebooks` makes and executes them."""
