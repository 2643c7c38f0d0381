"""The queries and keys of a call, in the terms of calls without a plan."""

from __future__ import annotations

from ..engine.rows import Batch as Batch
