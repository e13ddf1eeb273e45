"""What must hold of each parser for any bytes: used by the tests of the suite and by `fuzz.run`.

A target raises AssertionError, or what the parser let through, if it does not hold.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import hpack
from fuzz import checkpoints
from google.protobuf.message import DecodeError
from modelserver_backends.llm.checkpoint.gguf_file import GgufFile

from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.frontends.grpc.envelope import MalformedError as UnwalkableError
from modelserver.frontends.grpc.envelope import split_request
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.call import RpcError
from modelserver.wire.assembly import AssemblyBudget
from modelserver.wire.http2 import hpack_tables
from modelserver.wire.http2.grpc_compression import decompress, decompress_on_loop
from modelserver.wire.http2.head import (
    MAX_TIMEOUT_NS,
    HeadReader,
    MalformedError,
    RequestHead,
    check_trailers,
    parse_timeout,
    read_request_head,
)
from modelserver.wire.http2.hpack import Decoder, HeaderListTooLargeError, HpackError
from modelserver.wire.http2.hpack_tables import Field
from modelserver.wire.http2.message import MessageAssembly

_LIST_BYTES = 16 * 1024
_TABLE_BYTES = 4096
_MESSAGE_BYTES = 100_000


def pieces_of(data: bytes) -> list[bytes]:
    """Cut `data` where it says itself: each piece follows a byte with its length."""
    found = []
    at = 0
    while at < len(data):
        found.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return found


def hpack_blocks(data: bytes) -> None:
    """Header blocks of one connection: fields or one of two errors, as the `hpack` package has it."""
    decoder, oracle = Decoder(_LIST_BYTES), hpack.Decoder(max_header_list_size=1 << 24)
    for block in pieces_of(data):
        generation = decoder.generation
        fields: tuple[Field, ...] | None
        try:
            fields = decoder.decode(block)
        except HpackError:
            return
        except HeaderListTooLargeError:
            fields = None
        assert 0 <= decoder.table_bytes <= _TABLE_BYTES
        expected = tuple((bytes(name), bytes(value)) for name, value in oracle.decode(block, raw=True))
        num_bytes = sum(len(name) + len(value) + 32 for name, value in expected)
        assert (fields is None) == (num_bytes > _LIST_BYTES)
        assert fields in (None, expected)
        assert decoder.table_bytes == sum(
            len(name) + len(value) + 32 for name, value in oracle.header_table.dynamic_entries
        )
        if fields is not None and decoder.generation == generation:
            assert decoder.decode(block) == fields, "a block that left the table alone means something else now"


def huffman_string(data: bytes) -> None:
    """One string, which has no other encoding."""
    try:
        text = hpack_tables.decode(data)
    except hpack_tables.HuffmanError:
        return
    assert len(text) <= len(data) * 8 // 5


def request_head(data: bytes) -> None:
    """Any fields are a request or malformed; the reader of a connection finds the same as the function."""
    pieces = pieces_of(data)
    fields = tuple(zip(pieces[::2], pieces[1::2], strict=False))
    pseudo = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b"), (b":authority", b"a"))
    grpc_call = (*pseudo, (b"content-type", b"application/grpc"))
    for whole in (fields, (*pseudo, *fields), (*grpc_call, *fields), (*grpc_call, (b"grpc-timeout", b"1S"), *fields)):
        reader = HeadReader()
        expected = _seen(read_request_head, whole)
        assert _seen(reader.read, whole) == expected
        assert _seen(reader.read, whole) == expected, "the second reading differs"
    try:
        check_trailers(fields)
    except MalformedError:
        return
    assert all(name and name == name.lower() and b":" not in name for name, _ in fields)


def _seen(read: Callable[[tuple[Field, ...]], RequestHead], fields: tuple[Field, ...]) -> list[object]:
    try:
        head = read(fields)
    except MalformedError:
        return []
    names = [name for name in RequestHead.__slots__ if not name.startswith("_") and name != "fields"]
    seen: list[object] = [getattr(head, name) for name in names]
    if head.is_grpc and head.problem is None:
        seen.append(head.metadata)
    elif not head.is_grpc:
        seen += [head.http.method, head.http.path, head.http.query, head.http.headers]
    return seen


def grpc_timeout(data: bytes) -> None:
    """A number of nanoseconds or ValueError."""
    try:
        timeout_ns = parse_timeout(data)
    except ValueError:
        return
    assert 0 <= timeout_ns <= MAX_TIMEOUT_NS


def grpc_messages(data: bytes) -> None:
    """Length-prefixed messages in any pieces: the same as from all of them at once, and no memory stays charged."""
    pieces = pieces_of(data)
    budget = AssemblyBudget(_MESSAGE_BYTES)
    assert _messages(budget, pieces) == _messages(budget, [b"".join(pieces)])
    assert budget.num_bytes == 0


def _messages(budget: AssemblyBudget, pieces: list[bytes]) -> list[object]:
    assembly, found = MessageAssembly(budget, _MESSAGE_BYTES), []
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                num_taken = assembly.add(view)
                assert 0 < num_taken <= len(view)
                view = view[num_taken:]
                if assembly.is_complete:
                    found.append((assembly.is_compressed, bytes(assembly.take())))
    except RpcError as error:
        found.append((error.status, error.message))
    else:
        found.append(("begun", assembly.is_begun))
    assembly.drop()
    return found


def compressed_message(data: bytes) -> None:
    """A bounded message or an RpcError; the event loop's function agrees with that of the thread."""
    for encoding in (b"gzip", b"deflate"):
        results: list[object] = []
        for function in (decompress, decompress_on_loop):
            try:
                results.append(function(data, encoding, _MESSAGE_BYTES))
            except RpcError as error:
                results.append((error.status, error.message))
        assert results[0] == results[1]
        assert not isinstance(results[0], bytes) or len(results[0]) <= _MESSAGE_BYTES


def infer_envelope(data: bytes) -> None:
    """What is cut out of a ModelInferRequest is what protobuf finds there, and the head is what is left."""
    for message in (data, memoryview(bytearray(data))):
        try:
            whole = pb.ModelInferRequest.FromString(data)
        except DecodeError:
            whole = None
        try:
            split = split_request(message)
        except UnwalkableError:
            return
        try:
            head = pb.ModelInferRequest.FromString(split.head)
            head.id = bytes(split.id).decode()
        except (DecodeError, UnicodeDecodeError):
            assert whole is None, "protobuf reads what the cut has broken"
            return
        if whole is None:
            return
        assert [bytes(raw) for raw in split.raws] == list(whole.raw_input_contents)
        assert split.num_parameters or not whole.parameters
        del whole.raw_input_contents[:]
        assert head.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)


def gguf_file(data: bytes) -> None:
    """A file or an error that names it; whatever is in it lies within the file, and tensors do not overlap."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        path.write_bytes(data)
        problem = ""
        try:
            file = GgufFile(path)
        except (InvalidArgumentError, UnsupportedError) as error:
            problem = error.message
        if problem:
            assert str(path) in problem
            return
        covered = bytearray(len(data))
        for name, place in file.tensors.items():
            rows = file.rows(name).tobytes()
            assert rows == data[place.start : place.start + place.num_bytes]
            assert not any(covered[place.start : place.start + place.num_bytes])
            covered[place.start : place.start + place.num_bytes] = b"\1" * place.num_bytes
        for key in file.keys:
            for read in (file.integer, file.number, file.flag, file.text, file.texts, file.numbers):
                with contextlib.suppress(InvalidArgumentError):
                    read(key)
        file.close()


PARSERS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        hpack_blocks,
        huffman_string,
        request_head,
        grpc_timeout,
        grpc_messages,
        compressed_message,
        infer_envelope,
        gguf_file,
    )
} | checkpoints.TARGETS
