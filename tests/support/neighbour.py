"""Somebody beside whom others misbehave."""

from __future__ import annotations

from support.raw_http2 import Peer


class Neighbour:
    """A client that behaves: before, beside and after an attack it is served."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._next_id = 1

    def is_served(self) -> None:
        """One call over gRPC, one over HTTP/2."""
        peer, call_id, get_id = self._peer, self._next_id, self._next_id + 2
        self._next_id += 4
        peer.call(call_id, "Echo", b"%d" % call_id)
        assert peer.expect_answer(call_id).messages == [b"%d" % call_id]
        peer.get(get_id)
        assert peer.expect_answer(get_id).body == b"hello"
