"""Merging attention states: pairs, and states of a row."""
