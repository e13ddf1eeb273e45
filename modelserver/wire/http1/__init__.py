"""HTTP/1.1 connections: reading heads and bodies, writing answers, limits against abuse."""
