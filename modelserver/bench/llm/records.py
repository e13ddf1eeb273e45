"""Records of a language model's answers."""

from __future__ import annotations

import msgspec


class Call(msgspec.Struct, array_like=True, frozen=True):
    """One answered request. Times are of the monotonic clock, ns; `chunk_times` are of events that brought text.

    Token counts are those of the server's `usage`, None where it sent none.
    """

    due_ns: int
    start_ns: int
    end_ns: int
    step: int
    chunk_times: list[int]
    input_tokens: int | None
    output_tokens: int | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Call])


def pack_calls(calls: list[Call]) -> bytes:
    return _encoder.encode(calls)


def unpack_calls(packed: bytes) -> list[Call]:
    return _decoder.decode(packed)
