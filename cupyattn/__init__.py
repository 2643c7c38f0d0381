"""cupyattn: LLM attention on any DLPack tensors, with CUDA kernels loaded through CuPy."""
