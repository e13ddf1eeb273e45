"""The client side: connections over HTTP/1.1, HTTP/2 and gRPC, and control of a server. Knows nothing of load."""
