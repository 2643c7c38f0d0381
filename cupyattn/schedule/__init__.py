"""Planners: functions of integers that decide who computes what. NumPy and nothing else."""

from .masking import Masking
from .single import MAX_GRID_YZ, SinglePlan, plan_single, tile_span

__all__ = ["MAX_GRID_YZ", "Masking", "SinglePlan", "plan_single", "tile_span"]
