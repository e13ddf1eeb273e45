"""What the LLM engine costs and how fast it is."""
