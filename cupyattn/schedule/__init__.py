"""Planners: functions of integers that decide who computes what. NumPy and nothing else."""

from .masking import Masking, tile_span

__all__ = ["Masking", "tile_span"]
