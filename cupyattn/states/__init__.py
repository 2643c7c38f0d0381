"""Partial states (V, LSE) and their merges."""
