"""KServe v2 with Triton's extensions over HTTP, and the endpoints of clouds that wrap it."""
