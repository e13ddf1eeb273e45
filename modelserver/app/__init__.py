"""The process: how its parts are put together at start, and how it stops."""
