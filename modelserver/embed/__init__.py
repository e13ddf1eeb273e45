"""A server in a Python program: see `modelserver.embed.server`."""
