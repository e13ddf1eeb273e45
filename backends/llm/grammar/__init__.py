"""Constrained decoding: what the text must be, as which tokens may come next."""

from .compile import compile_grammar
from .matcher import Grammar, Matcher

__all__ = ["Grammar", "Matcher", "compile_grammar"]
