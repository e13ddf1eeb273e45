"""The LLM engine by itself, beside transformers: `python -m benchmarks.llm`."""
