"""Speculative decoding: guesses of a sequence's next tokens (drafts), which one step of the network checks together."""
