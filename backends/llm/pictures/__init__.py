"""Pictures in prompts: from files to rows of embeddings, which take the places of tokens.

`opening` reads files, `families` knows what differs between checkpoints, `tower` computes embeddings, `prompt` places
them among tokens, `reader` does all of that for a request and keeps what it has computed, and `step` says what of a
step's rows is picture.
"""
