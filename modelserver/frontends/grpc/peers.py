"""Methods whose calls the audit log has: it is told where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelserver.auth.api_keys import SCOPE_OF, Scope
from modelserver.protocol.call import Method, UnaryCall
from modelserver.telemetry.audit import PEER


def with_peers(methods: Mapping[str, Method]) -> dict[str, Method]:
    """The methods; calls of those of control know where they come from. All of these are unary."""
    return {
        path: _knowing_peer(method) if SCOPE_OF[method.needs] is Scope.ADMIN else method
        for path, method in methods.items()
    }


def _knowing_peer(method: Method) -> Method:
    unary = method.unary
    assert unary is not None, "what controls the server is unary"

    def known(call: UnaryCall) -> None:
        token = PEER.set(call.peer)
        try:
            unary(call)
        finally:
            PEER.reset(token)

    return replace(method, unary=known)
