"""Launchers of the attention kernels and of what goes before and after them."""
