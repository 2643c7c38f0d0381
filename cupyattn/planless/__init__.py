"""Attention of a batch whose lengths stay on the device."""
