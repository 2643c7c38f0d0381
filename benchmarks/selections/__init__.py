"""Selections beside their peers: the greatest scores of an index, by which tokens choose keys."""
