"""The model store: manifests and content-addressed blobs in Ollama's layout, and the places that models come from."""
