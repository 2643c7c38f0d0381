"""Tokens that attend to lists of keys, and block-sparse prompts: shapes, inputs, ours and peers."""
