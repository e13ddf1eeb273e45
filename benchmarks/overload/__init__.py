"""What becomes of a server that is asked for more than it can do: see `__main__`."""
