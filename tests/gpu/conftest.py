"""What the GPU suite needs of its frameworks before they start."""

from __future__ import annotations

import os

# JAX would otherwise take three quarters of the memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
