"""Vectors of texts: a checkpoint's pooling, and networks of encoders, which do not generate."""
