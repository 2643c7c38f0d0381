"""What several test suites share: the low-precision model, tolerances, poison and random cases."""
