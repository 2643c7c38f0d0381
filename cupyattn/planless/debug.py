"""CUPYATTN_DEBUG=1: what calls without a plan trust device memory with, read and checked."""

from __future__ import annotations

from .. import array
from .check import Call
from .reference import check_pages, requests_of
from .views import Names


def check_values(call: Call, names: Names) -> None:
    """Wait for lengths, offsets and page tables; ArgumentError for what would be cut or stray."""
    requests = requests_of(call, array.to_host, names)
    if call.block_tables is not None:
        check_pages(call, requests, array.to_host(call.block_tables), names.block_tables)
