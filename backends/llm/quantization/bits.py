"""Codes of a few bits, as they are packed into words and bytes."""

from __future__ import annotations

import sys

import torch

_WORD = 32


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Words int32 [..., words], a stream of codes with the low bits first -> uint8 [..., count].

    A code may begin in one word and end in the next, as those of 3 bits do. What pads the last word is dropped.
    """
    if _WORD % bits == 0 and bits <= 8:
        return _unpack_bytes(_bytes(words), bits)[..., :count]
    block_words = bits  # 32 codes fill `bits` words
    padding = -words.shape[-1] % block_words
    blocks = torch.nn.functional.pad(words, (0, padding)).unflatten(-1, (-1, block_words))
    codes = torch.empty((*blocks.shape[:-1], _WORD), dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for index in range(_WORD):
        word, shift = divmod(index * bits, _WORD)
        # Shifts of negative words bring in ones: what lies above the word is masked before the next word is added.
        value = (blocks[..., word] >> shift) & (mask & ((1 << (_WORD - shift)) - 1))
        if shift + bits > _WORD:
            value |= (blocks[..., word + 1] << (_WORD - shift)) & mask
        codes[..., index] = value
    return codes.flatten(-2)[..., :count]


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., bytes] -> uint8 [..., 2 * bytes]: the low half of each byte first."""
    return _unpack_bytes(packed, 4)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    assert sys.byteorder == "little", "words are read as their bytes, the low ones first"
    return words.contiguous().view(torch.uint8)


def _unpack_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack_words` for codes of 4 or 8 bits: uint8 [rows, count] -> int32 [rows, words]."""
    if bits == 4:
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).contiguous().view(torch.int32)
