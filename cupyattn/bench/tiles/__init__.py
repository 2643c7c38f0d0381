"""Times of every candidate of drawn batches, and the card that is fitted to them: the core of
`cupyattn tune`, and of `python -m benchmarks tiles` and `fit`."""
