"""What attention in 8 bits costs in accuracy: Hopper's arithmetic in NumPy, and errors of its use.

python -m benchmarks.eight_bits            # the errors, as a table
python -m benchmarks.eight_bits --write    # and as errors.json, for the charts of the documents
"""
