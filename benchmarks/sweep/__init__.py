"""Shapes drawn from real models and schedules: what nobody tuned, beside the peers."""
