"""Constrained decoding: the required form of a text, as the tokens that may come next."""

from .compile import ENGINES, compile_grammar, default_engine
from .matcher import Grammar, Matcher, accepted_prefix, allowed_mask, fill_masks, unpacked

__all__ = [
    "ENGINES",
    "Grammar",
    "Matcher",
    "accepted_prefix",
    "allowed_mask",
    "compile_grammar",
    "default_engine",
    "fill_masks",
    "unpacked",
]
