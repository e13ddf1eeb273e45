"""OpenAI's files and batches: requests that are answered later, from a file into a file."""
