"""OpenAI's newer API of responses: items in, items out."""
