"""OpenAI's API: translators between its JSON and the tensor contract of language models."""
