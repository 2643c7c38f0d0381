"""Planners: functions of integers that decide who computes what. NumPy and nothing else."""

from .single import SinglePlan, key_span, plan_single, tile_span

__all__ = ["SinglePlan", "key_span", "plan_single", "tile_span"]
