"""Measuring language models: prompts in, streamed tokens out."""
