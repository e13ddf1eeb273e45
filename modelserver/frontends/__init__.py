"""Protocols: bytes to requests and back, routes, and errors to statuses. No sockets."""
