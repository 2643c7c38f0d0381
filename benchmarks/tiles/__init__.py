"""Times of every candidate of drawn batches, and the data of a card that are fitted to them."""
