"""Launchers: pick the tile configuration, fill the Params struct, launch on the caller's stream."""
