"""Transports between sockets and the protocols: plain and TLS, with a part in C."""
