"""Which kernels serve a call: candidates, what each would take on this card, and the least."""
