"""API keys: the file of their hashes, and the key of a call.

A key is `msk_<id>_<secret>`, of which the file has the id and a salted SHA-256 of the whole. The secret is 256 random
bits that we draw, so it cannot be guessed from a hash: a slow hash, made for passwords, would only give attackers a way
to keep the server busy with wrong keys. The id, which is not secret, finds the one entry to compare with.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from hmac import compare_digest
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from modelserver.auth.access import ApiGroup
from modelserver.auth.caller_limits import NO_LIMITS, CallerLimits, parse_limits
from modelserver.core.documents import RepeatedFieldError, parse_yaml
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from modelserver.telemetry.access_log import note_key
from modelserver.telemetry.file_reloads import FileReloads

_logger = logging.getLogger(__name__)

FLAG: Final = "--api-keys-file"
# The least time between two checks whether the file has changed; only requests cause checks.
LOOK_S: Final = 1.0

_KEY = re.compile(r"msk_([0-9a-f]{8})_[A-Za-z0-9_-]{43}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{8}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})", re.ASCII)
# A scope of an installed API: the API's name, and a word.
_API_SCOPE = re.compile(r"[a-z][a-z0-9-]{0,31}:[a-z][a-z0-9-]{0,31}", re.ASCII)
_FIELDS = ("name", "id", "hash", "scopes", "models", "expires", "limits")
_MAX_FILE_BYTES = 4 << 20
_DAY_S = 86_400

_MISSING = "an API key is needed: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
_WRONG = "the API key is wrong or was revoked"
_EXPIRED = "the API key has expired; ask for a new one"


@dataclass(frozen=True, slots=True)
class Scope:
    """A permission of a key, by its name. No scope includes another; a key may have several.

    The server's own calls need one of `SCOPES`. An installed API may have scopes of its own, as `api-name:word`.
    """

    value: str

    INFER: ClassVar[Scope]
    METRICS: ClassVar[Scope]
    ADMIN: ClassVar[Scope]


Scope.INFER, Scope.METRICS, Scope.ADMIN = SCOPES = (Scope("infer"), Scope("metrics"), Scope("admin"))

# The usual scopes of groups: a model's users may ask for its readiness, and everybody for the server's.
_OTHER_SCOPES: Final = {
    ApiGroup.STATISTICS: Scope.METRICS,
    ApiGroup.SHARED_MEMORY: Scope.ADMIN,
    ApiGroup.MODEL_REPOSITORY: Scope.ADMIN,
    ApiGroup.TRACE: Scope.ADMIN,
    ApiGroup.LOGGING: Scope.ADMIN,
}


def scope_of(group: ApiGroup) -> Scope:
    """The scope that calls of a group need, unless a route says otherwise."""
    return _OTHER_SCOPES.get(group, Scope.INFER)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry of the file. `models` are patterns of names with `*` and `?`; without any, it is for all models.

    `limits` are its quotas and its weight where callers wait for the same model. From `expires_s`, in seconds since
    1970, it is invalid.
    """

    name: str
    id: str
    salt: bytes
    digest: bytes
    scopes: frozenset[Scope]
    models: tuple[str, ...] = ()
    limits: CallerLimits = NO_LIMITS
    expires_s: float | None = None

    def allows_model(self, name: str) -> bool:
        """Whether the key is for that model."""
        return not self.models or any(fnmatchcase(name, pattern) for pattern in self.models)

    def check_scope(self, scope: Scope) -> None:
        """Raises PermissionDeniedError for a key without that scope."""
        if scope not in self.scopes:
            raise PermissionDeniedError(f"the API key '{self.name}' has no scope '{scope.value}', which this needs")

    def check_model(self, name: str) -> None:
        """Raises PermissionDeniedError for a key that is not for that model, whether the model exists or not."""
        if not self.allows_model(name):
            raise PermissionDeniedError(f"the API key '{self.name}' is not for model '{name:.200}'")

    @property
    def line(self) -> str:
        """The entry as the file has it."""
        fields: dict[str, Any] = {
            "name": self.name,
            "id": self.id,
            "hash": f"sha256:{self.salt.hex()}:{self.digest.hex()}",
            "scopes": sorted(scope.value for scope in self.scopes),
        }
        if self.models:
            fields["models"] = list(self.models)
        if self.limits != NO_LIMITS:
            fields["limits"] = self.limits.fields
        if self.expires_s is not None:
            fields["expires"] = date_text(self.expires_s)
        text: str = yaml.safe_dump([fields], default_flow_style=None, sort_keys=False, width=10_000)
        return text


# The key of the call that is being answered; None if no key was needed.
CALLER: Final[ContextVar[ApiKey | None]] = ContextVar("modelserver_caller", default=None)


def caller_name() -> str:
    """The name of that key; empty without keys."""
    key = CALLER.get()
    return "" if key is None else key.name


def create_key(
    name: str,
    scopes: frozenset[Scope],
    models: tuple[str, ...] = (),
    limits: CallerLimits = NO_LIMITS,
    *,
    expires_s: float | None = None,
) -> tuple[str, ApiKey]:
    """A new key: the text for its owner, which is stored nowhere, and the entry. Raises InvalidArgumentError."""
    _check_name(name)
    key_id, salt = secrets.token_hex(4), secrets.token_bytes(16)
    text = f"msk_{key_id}_{secrets.token_urlsafe(32)}"
    return text, ApiKey(name, key_id, salt, _digest(salt, text), scopes, models, limits, expires_s)


def read_keys(path: Path) -> dict[str, ApiKey]:
    """The entries of a file by their ids. Raises InvalidArgumentError, which never quotes the file's hashes."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{FLAG}: cannot read '{path}': {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise InvalidArgumentError(f"{FLAG}: '{path}' is over the limit of {_MAX_FILE_BYTES} bytes")
    try:
        entries = parse_yaml(content, f"{FLAG}: '{path}'")
    except RepeatedFieldError as error:
        # Without the field's name, which might be a key written there by mistake.
        raise InvalidArgumentError(
            f"{FLAG}: '{path}', line {error.line}: a field is there twice, first in line {error.first_line}; "
            "every entry begins with '- ', and an entry is removed as a whole"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise InvalidArgumentError(f"{FLAG}: '{path}'{place} is not YAML") from None
    if entries is None:
        entries = []
    if not isinstance(entries, list):
        raise InvalidArgumentError(f"{FLAG}: '{path}' must be a list of entries, as `modelserver keys create` writes")
    keys: dict[str, ApiKey] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        key = _read_entry(f"{FLAG}: '{path}', entry {number}", entry)
        if key.id in keys or key.name in names:
            raise InvalidArgumentError(f"{FLAG}: '{path}', entry {number}: its name or id is there twice: '{key.name}'")
        keys[key.id] = key
        names.add(key.name)
    return keys


class KeyRing:
    """The keys of a file over time: a changed file is read again; if it is broken, the old keys stay."""

    def __init__(
        self,
        path: str,
        reloads: FileReloads | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        today_s: Callable[[], float] = time.time,
    ) -> None:
        """Raises InvalidArgumentError for an unusable file. `reloads` counts later reads; `today_s` is a clock."""
        self._path = Path(path)
        self._clock = clock
        self._today_s = today_s
        self._seen = self._fingerprint()
        self._keys = read_keys(self._path)
        self._reloads = reloads or FileReloads()
        self._reloads.took(FLAG)
        self._limits = _limits(self._keys)
        self._next_look_s = clock() + LOOK_S

    def caller(self, headers: Mapping[str, str | bytes]) -> ApiKey:
        """The key in the headers (names in lower case). Raises UnauthenticatedError."""
        text = _given(headers)
        if text is None:
            raise UnauthenticatedError(_MISSING)
        if self._clock() >= self._next_look_s:
            self.look()
        match = _KEY.fullmatch(text)
        key = self._keys.get(match[1]) if match is not None else None
        if key is None or not compare_digest(_digest(key.salt, text), key.digest):
            raise UnauthenticatedError(_WRONG)
        self._check_date(key)
        note_key(key.name)
        return key

    def limits_of(self, name: str) -> CallerLimits | None:
        """The limits of the key of that name, as the file has them now; None without limits or for an unknown name."""
        if self._clock() >= self._next_look_s:
            self.look()
        return self._limits.get(name)

    def named(self, name: str) -> ApiKey | None:
        """The key of that name, as the file has it now; None if there is none."""
        if self._clock() >= self._next_look_s:
            self.look()
        return next((key for key in self._keys.values() if key.name == name), None)

    def check_current(self, key: ApiKey) -> None:
        """Raises UnauthenticatedError for a key that was revoked, changed or expired since its call began."""
        if self._clock() >= self._next_look_s:
            self.look()
        if self._keys.get(key.id) is not key:
            raise UnauthenticatedError(_WRONG)
        self._check_date(key)

    def _check_date(self, key: ApiKey) -> None:
        if key.expires_s is not None and self._today_s() >= key.expires_s:
            raise UnauthenticatedError(_EXPIRED)

    def look(self) -> None:
        """Read the file if it has changed."""
        self._next_look_s = self._clock() + LOOK_S
        seen = self._fingerprint()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            found = read_keys(self._path)
        except InvalidArgumentError as error:
            _logger.error("the new API keys are not used, the old ones stay: %s", error.message)
            self._reloads.failed(FLAG, seen)
            return
        self._reloads.took(FLAG)
        old = self._keys
        # Unchanged entries stay the same objects: calls that began with them continue.
        self._keys = {key_id: old[key_id] if old.get(key_id) == key else key for key_id, key in found.items()}
        self._limits = _limits(self._keys)
        _logger.info("took the new API keys of %s: %d", self._path, len(found))

    def _fingerprint(self) -> tuple[int, ...]:
        """A stamp that changes when the file is replaced; empty while it is missing."""
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def open_keys(path: str, reloads: FileReloads | None = None) -> KeyRing | None:
    """The keys of a file; None without one. Raises InvalidArgumentError when it is invalid."""
    return KeyRing(path, reloads) if path else None


def parse_date(value: object) -> float:
    """The end of a day in UTC, or a time with its zone, as seconds since 1970. Raises InvalidArgumentError."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        is_day = isinstance(value, str) and len(value) == len("2026-12-31")
    except ValueError:
        moment, is_day = None, False
    if isinstance(moment, datetime) and is_day:
        return moment.replace(tzinfo=UTC).timestamp() + _DAY_S
    if isinstance(moment, date) and not isinstance(moment, datetime):
        return datetime(moment.year, moment.month, moment.day, tzinfo=UTC).timestamp() + _DAY_S
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidArgumentError("a key expires at a day such as 2026-12-31 or a time such as 2026-12-31T12:00:00Z")
    return moment.timestamp()


def date_text(seconds: float) -> str:
    """Seconds since 1970, as `parse_date` reads them."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_scopes(words: list[str]) -> frozenset[Scope]:
    """Scopes by their names. Raises InvalidArgumentError for none, or an unknown one."""
    known = [scope.value for scope in SCOPES]
    unknown = next((word for word in words if word not in known and not _API_SCOPE.fullmatch(word)), None)
    if unknown is not None or not words:
        got = f"'{unknown}'{nearest_hint(unknown, known)}" if unknown is not None else "none"
        raise InvalidArgumentError(
            f"the scopes of an API key are some of {', '.join(known)}, or those of an installed API as api-name:word, "
            f"got {got}"
        )
    return frozenset(map(Scope, words))


def _limits(keys: Mapping[str, ApiKey]) -> dict[str, CallerLimits]:
    return {key.name: key.limits for key in keys.values() if key.limits != NO_LIMITS}


def _given(headers: Mapping[str, str | bytes]) -> str | None:
    value = headers.get("authorization")
    if value is not None:
        scheme, _, key = _text(value).strip().partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
    value = headers.get("x-api-key")
    return None if value is None else _text(value).strip()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode()).digest()


def _read_entry(where: str, entry: object) -> ApiKey:
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"{where}: expected {', '.join(_FIELDS)}, as `modelserver keys create` writes them")
    unknown = next((name for name in entry if name not in _FIELDS), None)
    if unknown is not None:
        # It might be a key written there by mistake: not even a part of it may be in an error.
        raise InvalidArgumentError(f"{where}: an entry has only the fields {', '.join(_FIELDS)}")
    name, key_id, text = (entry.get(field) for field in ("name", "id", "hash"))
    if not isinstance(name, str):
        raise InvalidArgumentError(f"{where}: 'name' must be a string")
    _check_name(name, where + ": ")
    if not isinstance(key_id, str) or not _ID.fullmatch(key_id):
        raise InvalidArgumentError(f"{where}: 'id' must be eight digits of the base 16, in quotes if all are decimal")
    match = _HASH.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidArgumentError(f"{where}: 'hash' must be sha256:SALT:DIGEST; the key itself does not belong there")
    scopes, models = entry.get("scopes", []), entry.get("models", [])
    if not _are_texts(scopes) or not _are_texts(models):
        raise InvalidArgumentError(f"{where}: 'scopes' and 'models' must be lists of strings")
    if "models" in entry and not models:
        raise InvalidArgumentError(f"{where}: 'models' is empty; leave it out for a key of all models")
    try:
        granted = parse_scopes(scopes)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error.message}") from None
    limits = entry.get("limits", {})
    if not isinstance(limits, dict):
        raise InvalidArgumentError(f"{where}: 'limits' must be a mapping, such as {{concurrent: 4, weight: 2}}")
    salt, digest = bytes.fromhex(match[1]), bytes.fromhex(match[2])
    parsed = parse_limits(f"{where}: limits", limits)
    return ApiKey(name, key_id, salt, digest, granted, tuple(models), parsed, _read_expiry(where, entry))


def _read_expiry(where: str, entry: Mapping[str, object]) -> float | None:
    if "expires" not in entry:
        return None
    try:
        return parse_date(entry["expires"])
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: 'expires': {error.message}") from None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _check_name(name: str, where: str = "") -> None:
    if not _NAME.fullmatch(name) or name.startswith("msk_"):
        raise InvalidArgumentError(
            f"{where}the name of an API key has up to 64 letters, digits and . _ @ -, and begins with one of the first"
        )
