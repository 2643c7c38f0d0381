"""A small benchmark for any user's card: `cupyattn bench`. `benchmarks/` has the large one."""
