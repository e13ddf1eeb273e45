"""What this process reads in the memory that another one writes: arrays, and the news that they are dead."""

from __future__ import annotations

import struct
import weakref
from collections import deque

from modelserver.execution.shared_buffer import ByteView, SharedBuffer


class _LeaseRef(weakref.ref[ByteView]):
    """Watches the root array of one lease of the peer's arena."""

    __slots__ = ("offset",)
    offset: int


class Leases:
    """Leases of the peer's arena. Views are made by one thread at a time; the last array may die on any thread."""

    def __init__(self, incoming: SharedBuffer) -> None:
        self._incoming = incoming
        self._roots: dict[int, _LeaseRef] = {}
        self._returned: deque[int] = deque()  # leases that this side is done with

    def view(self, offset: int, nbytes: int) -> ByteView:
        """The bytes of a lease; it is returned when this array and all that are made from it are dead."""
        root = self._incoming.view(offset, nbytes)
        watch = _LeaseRef(root, self._on_root_dead)
        watch.offset = offset
        self._roots[offset] = watch
        return root

    @property
    def has_returned(self) -> bool:
        """Whether the peer waits to hear of a lease."""
        return bool(self._returned)

    @property
    def num_returned(self) -> int:
        """Leases that the peer waits to hear of."""
        return len(self._returned)

    @property
    def num_alive(self) -> int:
        """Leases of which an array is still alive here."""
        return len(self._roots)

    def take_returned(self) -> list[int]:
        """The leases that died since the last call: the peer may use them again as soon as it hears of them."""
        if not self._returned:
            return []
        count = len(self._returned)
        return [self._returned.popleft() for _ in range(count)]

    def peek(self, number: struct.Struct) -> int:
        """A number at the start of the peer's memory; 0 when there is no memory yet."""
        if self._incoming.size() < number.size:
            return 0
        value: int = number.unpack_from(self._incoming.view(0, number.size).data)[0]
        return value

    def close(self) -> None:
        """Close the descriptor; arrays that are alive stay valid."""
        self._incoming.close()

    def _on_root_dead(self, watch: weakref.ref[ByteView]) -> None:
        # On whichever thread dropped the last array: first forget, then return, for the offset may come again at once.
        assert isinstance(watch, _LeaseRef)
        self._roots.pop(watch.offset, None)
        self._returned.append(watch.offset)
