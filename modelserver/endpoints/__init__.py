"""Servers that answer for one another: which there are, how they are, and which one gets the next request."""
