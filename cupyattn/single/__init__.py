"""Attention of one request."""
