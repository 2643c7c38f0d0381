"""Batches: ragged and paged problems, served by the wrappers of ours and of the peers."""
