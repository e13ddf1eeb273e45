"""The HPACK decoder of libnghttp2 (Debian's libnghttp2-14), by ctypes: an oracle for ours."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_ssize_t, c_uint8, c_void_p

Field = tuple[bytes, bytes]
_HAS_FIELD = 0x02


class _NameValue(ctypes.Structure):
    _fields_ = (
        ("name", c_void_p),
        ("value", c_void_p),
        ("name_length", c_size_t),
        ("value_length", c_size_t),
        ("flags", c_uint8),
    )


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL("libnghttp2.so.14")
    library.nghttp2_hd_inflate_new.argtypes = [POINTER(c_void_p)]
    library.nghttp2_hd_inflate_del.argtypes = [c_void_p]
    library.nghttp2_hd_inflate_end_headers.argtypes = [c_void_p]
    library.nghttp2_hd_inflate_hd2.argtypes = [
        c_void_p,
        POINTER(_NameValue),
        POINTER(c_int),
        c_void_p,
        c_size_t,
        c_int,
    ]
    library.nghttp2_hd_inflate_hd2.restype = c_ssize_t
    return library


_LIBRARY = _load()


class Nghttp2Inflater:
    """The state of one connection."""

    def __init__(self) -> None:
        self._inflater = c_void_p()
        if _LIBRARY.nghttp2_hd_inflate_new(byref(self._inflater)):
            raise MemoryError("nghttp2 made no inflater")

    def __del__(self) -> None:
        _LIBRARY.nghttp2_hd_inflate_del(self._inflater)

    def decode(self, block: bytes) -> tuple[Field, ...] | None:
        """The fields of `block`, or None if it is refused."""
        fields: list[Field] = []
        field, flags = _NameValue(), c_int()
        buffer = ctypes.create_string_buffer(block, len(block))
        start = ctypes.addressof(buffer)
        at = 0
        while True:
            num_read = _LIBRARY.nghttp2_hd_inflate_hd2(
                self._inflater, byref(field), byref(flags), start + at, len(block) - at, 1
            )
            if num_read < 0:
                return None
            at += num_read
            if flags.value & _HAS_FIELD:
                name = ctypes.string_at(field.name, field.name_length) if field.name_length else b""
                value = ctypes.string_at(field.value, field.value_length) if field.value_length else b""
                fields.append((name, value))
            elif at == len(block):
                break
        _LIBRARY.nghttp2_hd_inflate_end_headers(self._inflater)
        return tuple(fields)
