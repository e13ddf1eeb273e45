"""Large language models: paged KV cache, continuous batching, chunked prefill and prefix caching, on torch."""
