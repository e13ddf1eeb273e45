"""Authorization of a call: decided once, from its head and its route's declaration, for HTTP and gRPC alike.

A route or method says what it needs (`Needs`). The guard compares that with the headers of the operator's restrictions
and, if there are API keys, with the caller's key. The planes check whether the caller may use a model.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserver.auth.access import EVERYBODY, KEY_HEADERS, WITHOUT_KEY, Access, Admitted, ApiGroup
from modelserver.auth.api_keys import CALLER, ApiKey, KeyRing, Scope, scope_of
from modelserver.errors import PermissionDeniedError, ServerError
from modelserver.telemetry.audit import record

Headers = Mapping[str, str | bytes]


class KeyUse(enum.Enum):
    """Whether a call needs an API key, on a server that has keys."""

    NEEDED = "needed"
    # A caller without a key is served; a caller with a key must have the scope, and gets a fuller answer.
    OPTIONAL = "optional"
    # For load balancers, which have no key.
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of a route or method.

    `group` is the operator's: calls of a restricted group need a header. `scope` is what the caller's API key must
    have, where there are keys. `is_control`: the scope is `admin`; the audit log records such calls with their peers.
    """

    group: ApiGroup
    scope: Scope
    key: KeyUse = KeyUse.NEEDED
    is_control: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_control", self.scope == Scope.ADMIN)

    @classmethod
    def of(cls, group: ApiGroup, scope: Scope | None = None, key: KeyUse = KeyUse.NEEDED) -> Needs:
        """With the scope that the group's calls usually need, unless another one is given."""
        return cls(group, scope_of(group) if scope is None else scope, key)


class RestrictedError(PermissionDeniedError):
    """A call came without the header that the operator demands for its group; `header` is its name."""

    def __init__(self, header: str) -> None:
        super().__init__(f"This API is restricted, expecting header '{header}'")
        self.header = header


class Guard:
    """Applies the restrictions of one protocol, and the keys if there are any. Event loop thread only."""

    def __init__(self, access: Access, keys: KeyRing | None = None) -> None:
        self._restrictions = {group: rule for group in ApiGroup if (rule := access.restriction(group)) is not None}
        self._keys = keys

    @property
    def is_idle(self) -> bool:
        """Whether it admits every call."""
        return self._keys is None and not self._restrictions

    def admit(self, needs: Needs, headers: Headers, *what: str) -> ApiKey | None:
        """The caller's key; None if no key is needed. `what` names the call: a path, after its method if it has one.

        Raises UnauthenticatedError without a valid key, PermissionDeniedError for one without the scope, and
        RestrictedError. A refused call of control is recorded in the audit log.
        """
        caller = None
        if self._keys is not None and self._wants_key(needs, headers):
            caller = self._caller(self._keys, headers)
            if needs.scope not in caller.scopes:
                _refuse_scope(caller, needs, " ".join(what))
        self._check_group(needs, headers)
        return caller

    def beyond(self, needs: Needs) -> Guard:
        """The guard of calls that stand for another one, which was admitted for `needs`: only what they need beyond."""
        return _FurtherGuard(self, needs)

    def identify(self, headers: Headers) -> ApiKey | None:
        """The caller of an unknown path, which looks like a path that needs a key. Raises as `admit`."""
        return None if self._keys is None else self._caller(self._keys, headers)

    def admission(self, caller: ApiKey | None) -> Admitted:
        """The result of `admit` or `identify` in the form that a wire needs before it takes a body."""
        if caller is not None:
            return Admitted(caller.name)
        return EVERYBODY if self._keys is None else WITHOUT_KEY

    def _caller(self, keys: KeyRing, headers: Headers) -> ApiKey:
        return keys.caller(headers)

    def _check_group(self, needs: Needs, headers: Headers) -> None:
        restriction = self._restrictions.get(needs.group)
        if restriction is not None and not restriction.allows(headers):
            raise RestrictedError(restriction.key)

    def _wants_key(self, needs: Needs, headers: Headers) -> bool:
        if needs.key is KeyUse.OPTIONAL:
            return any(headers.get(name) is not None for name in KEY_HEADERS)
        return needs.key is KeyUse.NEEDED


def check_further(access: Access, needs: Needs, headers: Headers) -> None:
    """Check, within a call that was admitted for less, that its caller may do what needs this too.

    Raises PermissionDeniedError and RestrictedError, as `Guard.admit` does.
    """
    caller = CALLER.get()
    if caller is not None:
        caller.check_scope(needs.scope)
    restriction = access.restriction(needs.group)
    if restriction is not None and not restriction.allows(headers):
        raise RestrictedError(restriction.key)


class _FurtherGuard(Guard):
    """The caller is the one who was admitted, and the header of that call's group has been seen."""

    def __init__(self, guard: Guard, needs: Needs) -> None:
        self._keys = guard._keys
        self._restrictions = {group: rule for group, rule in guard._restrictions.items() if group is not needs.group}

    def _caller(self, keys: KeyRing, headers: Headers) -> ApiKey:
        return CALLER.get() or keys.caller(headers)


def _refuse_scope(caller: ApiKey, needs: Needs, what: str) -> None:
    """Raise PermissionDeniedError; an attempt to control the server is recorded."""
    try:
        caller.check_scope(needs.scope)
    except ServerError as error:
        if needs.is_control:
            token = CALLER.set(caller)
            record(what, "", error)
            CALLER.reset(token)
        raise
