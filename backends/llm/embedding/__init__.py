"""Vectors of texts: what a checkpoint says about pooling, and networks of encoders, which generate nothing."""
