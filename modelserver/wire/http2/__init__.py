"""HTTP/2 connections (RFC 9113), which carry REST and gRPC; HPACK, flow control, limits against abuse."""
