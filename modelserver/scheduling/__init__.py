"""Queues, batches, sequences and ensembles: which requests run together, and when."""
