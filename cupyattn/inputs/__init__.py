"""What a call is given, read and checked once."""
