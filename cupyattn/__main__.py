"""`python -m cupyattn`."""

from __future__ import annotations

import sys

from .cli import main

# Worker processes import this file under another name and must not start over.
if __name__ == "__main__":
    sys.exit(main())
