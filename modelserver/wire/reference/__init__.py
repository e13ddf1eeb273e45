"""uvicorn and grpcio in place of our own wire (`--wire=grpcio`)."""
