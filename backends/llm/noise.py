"""Noise that depends on a sequence's seed and the position of the token, and on nothing else.

It is computed on the host, whichever device holds the logits: a seed gives the same numbers on all of them, in
every batch, and a step can be prepared before the one before it has ended.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
# The increment of SplitMix64 (Steele, Lea, Flood 2014) and the multipliers of its 64-bit finaliser.
_WEYL = 0x9E3779B97F4A7C15
_MULTIPLIER_A = 0xBF58476D1CE4E5B9
_MULTIPLIER_B = 0x94D049BB133111EB


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which each input bit moves every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_A) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_B) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int, draw: int = 0) -> float:
    """A number in [0, 1) with 53 random bits. `draw` numbers the numbers that one position needs.

    Seed, position and draw are mixed one after the other, so neighbours in one of them have nothing in common.
    """
    state = _mix(seed + _WEYL)
    state = _mix(state + (position + 1) * _WEYL)
    state = _mix(state + draw * _WEYL)
    return (state >> 11) * (1.0 / (1 << 53))
