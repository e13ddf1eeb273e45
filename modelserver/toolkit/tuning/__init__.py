"""`modelserver tune`: which instance counts, batch sizes, delays and threads serve a model best, by measuring them."""
