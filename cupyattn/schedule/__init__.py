"""Planners: functions of integers that decide who computes what. NumPy and nothing else."""

from .single import MAX_GRID_YZ, SinglePlan, key_span, plan_single, tile_span

__all__ = ["MAX_GRID_YZ", "SinglePlan", "key_span", "plan_single", "tile_span"]
