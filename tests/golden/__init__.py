"""What calls launch, and the machine code of their kernels, held in files: see __main__.py."""
