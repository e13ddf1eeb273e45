"""The server's side of sockets: HTTP/1.1, HTTP/2, gRPC and TLS, on one port or several."""
