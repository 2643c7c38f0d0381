"""Which kernel, in which shape, serves a problem."""
