"""Every parser of what strangers send or wrote, fed with noise and with damaged samples of what it expects."""

from __future__ import annotations

import gzip
import struct
import zlib

import hpack
import pytest
from fuzz import checkpoint_samples, checkpoints, parsers
from hypothesis import given, settings
from hypothesis import strategies as st

from modelserver.pb import grpc_service_pb2 as pb

# How many of the first bytes have the structure, where it is more than usual.
_STRUCTURE = {"gguf_file": 250, **dict.fromkeys(checkpoints.TARGETS, 1000)}
NAMES = st.sampled_from(
    [*b"te key key-bin grpc-timeout grpc-encoding host content-length content-type :path :x K".split(b" "), b""]
)
VALUES = st.sampled_from([b"", b"1", b"5S", b"trailers", b"AA", b"AA,=", b" a", b"\r\n"]) | st.binary(max_size=10)


def _lengthened(pieces: list[bytes]) -> bytes:
    """The form in which targets take several pieces."""
    return b"".join(bytes((len(piece),)) + piece for piece in pieces)


def _infer_request() -> bytes:
    request = pb.ModelInferRequest(model_name="model", id="id", raw_input_contents=[b"raw", bytes(5000)])
    request.inputs.add(name="INPUT", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    request.parameters["key"].string_param = "value"
    return request.SerializeToString()


def _gguf_file() -> bytes:
    def text(content: bytes) -> bytes:
        return struct.pack("<Q", len(content)) + content

    def tensor(name: bytes, kind: int, offset: int) -> bytes:
        return text(name) + struct.pack("<I2QIQ", 2, 32, 1, kind, offset)

    values = text(b"k") + struct.pack("<I", 8) + text(b"v")
    values += (
        text(b"a") + struct.pack("<IIQ", 9, 8, 2) + text(b"x") + text(b"y") + text(b"n") + struct.pack("<II", 4, 7)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 3) + values + tensor(b"s", 0, 0) + tensor(b"t", 2, 128)
    return head + bytes(-len(head) % 32) + bytes(range(160))


SAMPLES = {
    **checkpoint_samples.SAMPLES,
    "gguf_file": [_gguf_file()],
    "infer_envelope": [_infer_request()],
    "compressed_message": [gzip.compress(b"message" * 30), zlib.compress(bytes(200_000))],
    "grpc_timeout": [b"12345678n", b"5S"],
    "grpc_messages": [
        _lengthened([b"\0\0\0", b"\0\2a", b"b\1\0\0\0\1c\0\0\0\0\0"]),
        _lengthened([b"\0\0\0\4\0", bytes(250), bytes(250), bytes(250), bytes(250), bytes(30)]),
    ],
    "huffman_string": [b"\xa8\xeb\x10\x64\x9c\xbf"],
    "request_head": [_lengthened([b"key", b"value", b"key-bin", b"AAEC", b"grpc-timeout", b"5S"])],
    "hpack_blocks": [
        _lengthened([hpack.Encoder().encode([(b"key", b"value" * 10), (b"a", b"b")]), b"\xbe\xbf", b"\x20\x82"])
    ],
}


@pytest.mark.parametrize("name", list(parsers.PARSERS))
@given(data=st.binary(max_size=200))
def test_noise(name: str, data: bytes) -> None:
    parsers.PARSERS[name](data)


@pytest.mark.parametrize("name", list(parsers.PARSERS))
@settings(max_examples=300)
@given(data=st.data())
def test_damaged_samples(name: str, data: st.DataObject) -> None:
    sample = bytearray(data.draw(st.sampled_from(SAMPLES[name])))
    for _ in range(data.draw(st.integers(0, 3))):
        # The first bytes have the structure, and deserve most of the damage.
        sample[data.draw(st.integers(0, min(len(sample), _STRUCTURE.get(name, 80)) - 1))] = data.draw(
            st.integers(0, 255)
        )
    cut = data.draw(st.sampled_from([len(sample), len(sample) // 2, 3]))
    parsers.PARSERS[name](bytes(sample[:cut]))


@settings(max_examples=300)
@given(st.lists(st.tuples(NAMES, VALUES), max_size=8))
def test_fields_of_requests(fields: list[tuple[bytes, bytes]]) -> None:
    parsers.request_head(_lengthened([piece for field in fields for piece in field]))


@given(st.lists(st.lists(st.tuples(NAMES, VALUES), max_size=5), max_size=6), st.booleans())
def test_blocks_of_an_encoder(lists: list[list[tuple[bytes, bytes]]], is_huffman: bool) -> None:
    encoder = hpack.Encoder()
    parsers.hpack_blocks(_lengthened([encoder.encode(fields, huffman=is_huffman)[:255] for fields in lists]))
