"""The parameters of a remote model's config."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from modelserver.backend import BackendContext, ConfigError, InvalidArgumentError, UnavailableError
from modelserver.client.address import Address, Tls
from modelserver.client.http_pool import MAX_CONNECTIONS
from modelserver.endpoints.choice import Policy

ENDPOINTS, DISCOVER = "endpoints", "discover"


class Protocol(enum.Enum):
    """What an endpoint speaks."""

    GRPC = "grpc"
    HTTP = "http"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Affinity(enum.Enum):
    """Which requests go to one endpoint; the values are those of the parameter."""

    NONE = "none"
    SEQUENCE = "sequence"
    SESSION = "session"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an endpoint is, and what it speaks. `base` is the path before every other one."""

    protocol: Protocol
    address: Address
    base: str = ""


_SCHEMES = {
    "grpc": (Protocol.GRPC, False, 8001),
    "grpcs": (Protocol.GRPC, True, 443),
    "http": (Protocol.HTTP, False, 80),
    "https": (Protocol.HTTP, True, 443),
    "openai+http": (Protocol.OPENAI, False, 80),
    "openai+https": (Protocol.OPENAI, True, 443),
    "anthropic+http": (Protocol.ANTHROPIC, False, 80),
    "anthropic+https": (Protocol.ANTHROPIC, True, 443),
}


def parse_place(url: str, tls: Tls) -> Place:
    """The place at `url`, such as `grpc://host:8001`. Raises InvalidArgumentError."""
    scheme, separator, rest = url.partition(":")
    if scheme == "unix" and rest:
        return Place(Protocol.HTTP, Address("", 0, unix_path=rest.removeprefix("//")))
    known = _SCHEMES.get(scheme)
    try:
        parts = urlsplit(f"x:{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if known is None or not separator or not host:
        schemes = ", ".join(f"{each}://" for each in _SCHEMES)
        raise InvalidArgumentError(f"expected an address with one of {schemes} or unix:, got '{url}'")
    protocol, is_secure, usual_port = known
    address = Address(host, port or usual_port, tls if is_secure else None)
    return Place(protocol, address, parts.path.rstrip("/"))


class Secret:
    """A key from a file, which is read again when it changes, or from a variable of the environment."""

    def __init__(self, path: Path | None, variable: str) -> None:
        self._path = path
        self._variable = variable
        self._identity: tuple[int, ...] = ()
        self._text = ""

    def read(self) -> str:
        """The key; empty if none is configured. Raises UnavailableError if it is not there."""
        if self._path is not None:
            try:
                status = self._path.stat()
                identity = (status.st_mtime_ns, status.st_size, status.st_ino)
                if identity != self._identity:
                    self._text, self._identity = self._path.read_text(encoding="utf-8").strip(), identity
            except (OSError, UnicodeDecodeError) as error:
                raise UnavailableError(f"the API key cannot be read from {self._path}: {error}") from None
            return self._text
        if self._variable:
            text = os.environ.get(self._variable, "").strip()
            if not text:
                raise UnavailableError(f"the variable {self._variable}, which holds the API key, is not set")
            return text
        return ""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Times are in seconds; 0 means no limit, or never."""

    endpoints: tuple[str, ...]
    discover: str
    scheme: str
    model: str
    version: str
    policy: Policy
    affinity: Affinity
    timeout_s: float
    connect_timeout_s: float
    health_interval_s: float | None
    retries: int
    is_idempotent: bool
    hedge_after: str
    max_connections: int
    max_pending: int
    fallback: tuple[str, ...]
    sends_binary: bool
    secret: Secret
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: Tls = field(default_factory=Tls)

    def place(self, url: str) -> Place:
        """The place of an endpoint. Raises InvalidArgumentError."""
        return parse_place(url, self.tls)

    @property
    def speaks_v2(self) -> bool:
        """Whether the endpoints speak KServe's protocol; others have an API of language models."""
        first = self.endpoints[0] if self.endpoints else f"{self.scheme}://host"
        return self.place(first).protocol in (Protocol.GRPC, Protocol.HTTP)


def read_options(context: BackendContext) -> RemoteOptions:
    """Raises ConfigError for a parameter that cannot be used."""
    what = f"model '{context.model_name}': parameter"
    policy, affinity = _choice(what, context)
    endpoints = tuple(context.parameter(ENDPOINTS).replace(",", " ").split())
    discover = context.parameter(DISCOVER).strip()
    if bool(endpoints) == bool(discover):
        raise ConfigError(
            f"model '{context.model_name}': expected one of the parameters {ENDPOINTS} (addresses such as "
            f"grpc://host:8001) and {DISCOVER} (dns://name:port, file:path or http://…)"
        )
    scheme = context.parameter("protocol", "grpc")
    if scheme not in _SCHEMES:
        raise ConfigError(f"{what} protocol: expected one of {', '.join(_SCHEMES)}, got '{scheme}'")
    hedge_after = context.parameter("hedge_after").strip()
    if hedge_after and hedge_after != "p95" and not hedge_after.isdigit():
        raise ConfigError(f"{what} hedge_after: expected milliseconds or p95, got '{hedge_after}'")
    key_file, key_variable = context.parameter("api_key_file"), context.parameter("api_key_env")
    if context.is_uploaded and (key_file or key_variable):
        raise ConfigError(f"{what} api_key_file: a model that came with a request may not name secrets of the server")
    interval = context.parameter("health_interval_ms")
    options = RemoteOptions(
        endpoints=endpoints,
        discover=discover,
        scheme=scheme,
        model=context.parameter("remote_model") or context.config.name or context.model_name,
        version=context.parameter("remote_version"),
        policy=policy,
        affinity=affinity,
        timeout_s=context.float_parameter("timeout_ms", 0) / 1000,
        connect_timeout_s=context.float_parameter("connect_timeout_ms", 1000) / 1000,
        health_interval_s=context.float_parameter("health_interval_ms") / 1000 if interval else None,
        retries=context.int_parameter("retries", 1),
        is_idempotent=context.bool_parameter("idempotent"),
        hedge_after=hedge_after,
        max_connections=context.int_parameter("max_connections", MAX_CONNECTIONS),
        max_pending=context.int_parameter("max_pending", 0),
        fallback=tuple(context.parameter("fallback").replace(",", " ").split()),
        sends_binary=context.bool_parameter("binary_tensors", True),
        secret=Secret(Path(key_file) if key_file else None, key_variable),
        headers=_headers(what, context.parameter("headers")),
        tls=Tls(
            context.parameter("tls_ca"),
            context.parameter("tls_cert"),
            context.parameter("tls_key"),
            server_name=context.parameter("tls_server_name"),
        ),
    )
    if options.hedge_after and not options.is_idempotent:
        raise ConfigError(f"{what} hedge_after: only requests of a model that is idempotent may be sent twice")
    _check_protocols(what, options)
    return options


def _choice(what: str, context: BackendContext) -> tuple[Policy, Affinity]:
    policy, affinity = context.parameter("policy", "least_outstanding"), context.parameter("affinity", "sequence")
    policies = [each.value for each in Policy]
    if policy not in (*policies, "hash"):
        raise ConfigError(f"{what} policy: expected one of {', '.join((*policies, 'hash'))}, got '{policy}'")
    if policy == "hash":
        policy, affinity = Policy.LEAST_OUTSTANDING.value, Affinity.PREFIX.value
    if affinity not in [each.value for each in Affinity]:
        raise ConfigError(
            f"{what} affinity: expected one of {', '.join(each.value for each in Affinity)}, got '{affinity}'"
        )
    return Policy(policy), Affinity(affinity)


def _check_protocols(what: str, options: RemoteOptions) -> None:
    """Refuse addresses that cannot be used, and those of different APIs."""
    try:
        protocols = {options.place(url).protocol for url in options.endpoints}
    except InvalidArgumentError as error:
        raise ConfigError(f"{what} {ENDPOINTS}: {error.message}") from None
    if len(protocols - {Protocol.GRPC, Protocol.HTTP}) + bool(protocols & {Protocol.GRPC, Protocol.HTTP}) > 1:
        raise ConfigError(f"{what} {ENDPOINTS}: all of them must speak the same API")


def _headers(what: str, text: str) -> dict[str, str]:
    """The headers of every request: an object of JSON."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"{what} headers: expected a JSON object of texts, got '{text:.100}'")
    for name, value in found.items():
        if not name or not (name + value).isprintable() or not name.isascii() or any(mark in name for mark in " :"):
            raise ConfigError(f"{what} headers: '{name:.100}' is not a header that can be sent")
    return {name.lower(): value for name, value in found.items()}
