"""The process: what is put together at start, and how it stops."""
