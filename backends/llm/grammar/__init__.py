"""Constrained decoding: what the text must be, as which tokens may come next."""
