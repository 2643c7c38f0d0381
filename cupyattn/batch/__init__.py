"""Attention of a batch that plan() has laid out on the host."""
