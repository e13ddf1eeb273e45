"""Which callers may call what, and how headers become parameters: the flags' rules, the same for both protocols.

Triton's groups of calls are protected by one header each, whose value is a shared secret.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hmac import compare_digest
from ipaddress import ip_address

from modelserver.core.body_pipe import BodyPipe
from modelserver.core.numerals import is_digits
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError

# Parameters that the server itself reads: no header may set one.
RESERVED_PARAMETERS = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "binary_data_output",
        "headers",
    }
)
RESERVED_PREFIX = "triton_"
# How endpoint pickers of the Gateway API name what a request is for.
OBJECTIVE_HEADER = "x-llm-d-inference-objective"
# Values of --callers-by, which says how callers are told apart; the name of a header follows the last one.
BY_ADDRESS, BY_HEADER = "address", "header:"
_MAX_CALLER_LEN = 128
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
# Where clients send an API key: no model gets to see one.
KEY_HEADERS = ("authorization", "x-api-key")


class ApiGroup(enum.Enum):
    """Calls that are protected together; the values are the flags' words."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A frontend's consent to a request, given on its head, before its body arrives.

    `caller` is the name of the request's key, which shares the memory of bodies between callers; empty without a key.
    `max_body_bytes` sets a lower limit on the body than the server's own. `open_body` makes the pipe for a body that is
    taken piece by piece, by its length, if it is announced; then the server's limit on bodies does not apply.
    """

    caller: str = ""
    max_body_bytes: int | None = None
    open_body: Callable[[int | None], BodyPipe] | None = field(default=None, compare=False)


EVERYBODY = Admitted()
# For a request that needs no key on a server with keys: it has no use for a body.
WITHOUT_KEY = Admitted(max_body_bytes=64 * 1024)


@dataclass(frozen=True, slots=True)
class Restriction:
    """Calls of these groups need the header `key`, in lower case, with the value `secret`."""

    groups: tuple[ApiGroup, ...]
    key: str
    secret: str

    def allows(self, headers: Mapping[str, str | bytes]) -> bool:
        """Whether a call with these headers may be made."""
        given = headers.get(self.key)
        if given is None:
            return False
        encoded = given.encode(errors="replace") if isinstance(given, str) else given
        return compare_digest(encoded, self.secret.encode())


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one protocol. `forward_pattern` is a regular expression for names of headers.

    `reads_context`: traces join the client's trace that a header names. `keys_file` has the API keys (`api_keys`);
    every call then needs one. If it is empty, none does. `is_logged`: each call has a line in the access log.
    `callers_by` says how callers without an API key are told apart: "address", "header:<name>", or "" for not at all.
    """

    restrictions: tuple[Restriction, ...] = ()
    forward_pattern: str = ""
    reads_context: bool = False
    keys_file: str = ""
    is_logged: bool = False
    callers_by: str = ""
    # Priority levels by the objective that an endpoint picker names.
    objectives: tuple[tuple[str, int], ...] = ()

    def priority(self, headers: Mapping[str, str | bytes]) -> int:
        """The level of the objective that a call's header names; 0 for none."""
        name = headers.get(OBJECTIVE_HEADER)
        return next((level for known, level in self.objectives if known == name), 0) if name else 0

    def caller(self, headers: Mapping[str, str | bytes], peer: str) -> str:
        """The caller of a call, from the address `peer` with its port, or from a header."""
        if self.callers_by == BY_ADDRESS:
            return peer.rpartition(":")[0].strip("[]") or peer
        value = headers.get(self.callers_by.removeprefix(BY_HEADER), "")
        return (value if isinstance(value, str) else value.decode("latin-1"))[:_MAX_CALLER_LEN]

    def restriction(self, group: ApiGroup) -> Restriction | None:
        """The header that calls of that group need, if any."""
        return next((each for each in self.restrictions if group in each.groups), None)

    def context(self, headers: Mapping[str, str | bytes]) -> str:
        """The trace that the call is a part of (W3C `traceparent`); empty for none, and if contexts are not read."""
        return str(headers.get("traceparent", "")) if self.reads_context else ""

    def forwarded(
        self, headers: Mapping[str, str | bytes], names: Mapping[str, str] | None = None
    ) -> dict[str, str] | None:
        """The headers that become parameters of the request; None where there are none.

        As in Triton, the pattern may match anywhere in the name, in any case, and the parameter keeps the name as it
        was sent: `names` has the names that were not in lower case. Raises InvalidArgumentError for a name that is
        reserved.
        """
        if not self.forward_pattern:
            return None
        names = names or {}
        return {
            names.get(name, name): value if isinstance(value, str) else value.decode("latin-1")
            for name, value in headers.items()
            if self._forwards(name, names.get(name, name))
        } or None

    def _forwards(self, name: str, name_as_sent: str) -> bool:
        if _compiled(self.forward_pattern).search(name_as_sent) is None:
            return False
        if self.keys_file and name in KEY_HEADERS:
            return False
        if name in RESERVED_PARAMETERS or name.startswith(RESERVED_PREFIX):
            raise InvalidArgumentError(f"header '{name:.100}' cannot be forwarded: that parameter's name is reserved")
        return True


@dataclass(frozen=True, slots=True)
class Cors:
    """Web pages that may call the server from a browser, by their origins; `*` is every page.

    `allows_credentials`: with the browser's cookies and certificates. API keys do not need it. `is_local`: the port
    listens on loopback, so that browsers reach it by a name of this machine, or through a proxy.
    """

    origins: tuple[str, ...] = ()
    allows_credentials: bool = False
    is_local: bool = False

    def allowed(self, origin: str) -> str | None:
        """The value of Access-Control-Allow-Origin for a page of that origin; None if it may not call."""
        if "*" in self.origins:
            return "*"
        return origin if origin.lower() in self.origins else None


def parse_cors(flag: str, origins: Sequence[str], *, allows_credentials: bool) -> Cors:
    """The rules that the flags set. Raises InvalidArgumentError for an invalid origin."""
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise InvalidArgumentError(
                f"{flag} expects an origin as browsers write it, such as https://chat.example.com or "
                f"http://localhost:3000, or * for every page, got '{origin:.100}'"
            )
    if allows_credentials and "*" in origins:
        raise InvalidArgumentError(
            f"{flag}=* and --http-cors-credentials exclude each other: browsers refuse both together; name the origins"
        )
    return Cors(tuple(origin.lower() for origin in origins), allows_credentials)


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern for names in any case. Case matters after RE2's `(?-i)`, for which Python needs a group."""
    head, switch, tail = pattern.partition("(?-i)")
    return re.compile(f"{head}(?-i:{tail})" if switch else pattern, re.IGNORECASE)


def parse_access(
    flag: str,
    restrictions: Sequence[str],
    forward_pattern: str,
    *,
    prefix: str = "",
    reads_context: bool = False,
    keys_file: str = "",
    is_logged: bool = False,
    callers_by: str = "",
    objectives: tuple[tuple[str, int], ...] = (),
) -> Access:
    """The rules that flags set; `prefix` precedes each key on the wire, `flag` is named in errors.

    Raises InvalidArgumentError for an invalid rule, an unknown group, a group that is in two rules, or a pattern that
    is not a regular expression.
    """
    rules = tuple(_parse_restriction(flag, text, prefix) for text in restrictions)
    groups = [group for rule in rules for group in rule.groups]
    repeated = next((group for group in groups if groups.count(group) > 1), None)
    if repeated is not None:
        raise InvalidArgumentError(
            f"{flag}: restricted {_kind(flag)} '{repeated.value}' can not be specified in multiple config groups; it "
            "can need only one header"
        )
    try:
        _compiled(forward_pattern)
    except re.error as error:
        raise InvalidArgumentError(
            f"the pattern of headers to forward, '{forward_pattern}', is not a regular expression: {error}"
        ) from None
    return Access(rules, forward_pattern, reads_context, keys_file, is_logged, callers_by, objectives)


def parse_objectives(flag: str, text: str) -> tuple[tuple[str, int], ...]:
    """Levels by objective, from `name=level[,name=level...]`. Raises InvalidArgumentError."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, level = part.partition("=")
        if not name or not is_digits(level) or not 0 < int(level) < 2**31:
            raise InvalidArgumentError(f"{flag} expects NAME=LEVEL[,NAME=LEVEL...], levels from 1, got '{part:.60}'")
        found[name] = int(level)
    return tuple(found.items())


def parse_callers_by(flag: str, text: str) -> str:
    """As `Access.callers_by`, from a flag that also knows key and none. Raises InvalidArgumentError."""
    name = text.removeprefix(BY_HEADER).strip().lower()
    if name in (*KEY_HEADERS, "cookie"):
        raise InvalidArgumentError(
            f"{flag}: what '{name}' holds is secret, and callers are named in metrics and errors"
        )
    if text.startswith(BY_HEADER) and re.fullmatch(r"[a-z0-9!#$%&'*+.^_`|~-]+", name):
        return BY_HEADER + name
    if text not in (BY_ADDRESS, "key", "none"):
        raise InvalidArgumentError(f"{flag} expects key, address, header:NAME or none, got '{text:.60}'")
    return BY_ADDRESS if text == BY_ADDRESS else ""


def _kind(flag: str) -> str:
    """The word for groups in a flag of restrictions, as in Triton: api or protocol."""
    return flag.rpartition("-")[2]


def _parse_restriction(flag: str, text: str, prefix: str) -> Restriction:
    names, colon, rule = text.partition(":")
    key, equals, secret = rule.partition("=")
    if not colon or not equals or not key.strip() or not secret:
        raise InvalidArgumentError(f"{flag} expects <group>[,<group>...]:<key>=<value>, got '{names}:...'")
    known = {group.value: group for group in ApiGroup}
    groups = []
    for name in names.split(","):
        group = known.get(name.strip())
        if group is None:
            raise InvalidArgumentError(
                f"{flag}: unknown restricted {_kind(flag)} '{name.strip()}', expected one of {', '.join(known)}"
                f"{nearest_hint(name, known)}"
            )
        groups.append(group)
    return Restriction(tuple(groups), prefix + key.strip().lower(), secret)


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach that address or name."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"
