"""`--cache-config`: the cache and its settings, with Triton's keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelserver.core.numerals import parse_float, parse_int
from modelserver.core.spelling import BOOL_EXPECTATION, bad_format, nearest_hint, parse_bool
from modelserver.errors import InvalidArgumentError

_FLAG = "--cache-config"
_LOCAL_KEYS = ("size", "ttl")
_REDIS_KEYS = (
    "host", "port", "user", "password", "db", "connect_timeout", "socket_timeout", "pool_size", "wait_timeout",
    "tls_enabled", "cert", "key", "cacert", "cert_dir", "ttl",
)  # fmt: skip
_KEYS: Mapping[str, tuple[str, ...]] = {"local": _LOCAL_KEYS, "redis": _REDIS_KEYS}
# A value may contain a comma, as passwords do, unless a key and an equals sign follow.
_NEXT_KEY = re.compile(r",(?=[a-z_]+=)")


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Answers in this process: `max_bytes` of them, each for `ttl_s` (None: until it is evicted)."""

    max_bytes: int
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Answers in a Redis server. Timeouts in seconds; `ca_directory` as OpenSSL's c_rehash makes it."""

    host: str
    port: int = 6379
    user: str = ""
    password: str = ""
    database: int = 0
    connect_timeout_s: float = 0.5
    socket_timeout_s: float = 0.5
    pool_size: int = 8
    wait_timeout_s: float = 0.5
    is_tls: bool = False
    certificate: str = ""
    key: str = ""
    ca_file: str = ""
    ca_directory: str = ""
    ttl_s: float | None = None


CacheSettings = LocalSettings | RedisSettings


def parse_cache_config(texts: Sequence[str], byte_size: int = 0) -> CacheSettings | None:
    """The cache that repeated --cache-config flags describe, or the deprecated --response-cache-byte-size; or None.

    Raises InvalidArgumentError that names the flag, the expected form and the value.
    """
    if texts and byte_size:
        raise InvalidArgumentError(
            f"Error: Incompatible flags --response-cache-byte-size and {_FLAG} both provided; leave out the first"
        )
    if not texts:
        return LocalSettings(byte_size) if byte_size else None
    values: dict[str, str] = {}
    names = dict.fromkeys(text.partition(",")[0].strip() for text in texts)
    if len(names) > 1:
        raise InvalidArgumentError(f"{_FLAG} describes several caches ({', '.join(names)}); a server has one")
    [name] = names
    if name not in _KEYS:
        raise InvalidArgumentError(
            f"{_FLAG} expects one of {', '.join(_KEYS)}, got '{name}'{nearest_hint(name, _KEYS)}"
        )
    for text in texts:
        values.update(_settings(name, text))
    return _local(values) if name == "local" else _redis(values)


def _settings(name: str, text: str) -> dict[str, str]:
    values = {}
    for part in _NEXT_KEY.split(text.partition(",")[2]):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise bad_format(_FLAG, "<cache name>,<setting>=<value>", text)
        if key not in _KEYS[name]:
            known = ", ".join(_KEYS[name])
            hint = nearest_hint(key, _KEYS[name])
            raise InvalidArgumentError(f"{_FLAG}={name}: expected one of {known}, got '{key}'{hint}")
        values[key] = value
    return values


def _local(values: Mapping[str, str]) -> LocalSettings:
    if "size" not in values:
        raise InvalidArgumentError(f"{_FLAG}=local needs size, in bytes, such as {_FLAG}=local,size=1073741824")
    return LocalSettings(_integer("local", values, "size", minimum=1), _ttl_s("local", values))


def _redis(values: Mapping[str, str]) -> RedisSettings:
    if not values.get("host"):
        raise InvalidArgumentError(f"{_FLAG}=redis needs host, such as {_FLAG}=redis,host=localhost")
    defaults = RedisSettings("")
    return RedisSettings(
        values["host"],
        port=_integer("redis", values, "port", minimum=1, default=defaults.port),
        user=values.get("user", ""),
        password=values.get("password", ""),
        database=_integer("redis", values, "db", minimum=0, default=0),
        connect_timeout_s=_milliseconds(values, "connect_timeout", defaults.connect_timeout_s),
        socket_timeout_s=_milliseconds(values, "socket_timeout", defaults.socket_timeout_s),
        pool_size=_integer("redis", values, "pool_size", minimum=1, default=defaults.pool_size),
        wait_timeout_s=_milliseconds(values, "wait_timeout", defaults.wait_timeout_s),
        is_tls=_boolean(values, "tls_enabled"),
        certificate=values.get("cert", ""),
        key=values.get("key", ""),
        ca_file=values.get("cacert", ""),
        ca_directory=values.get("cert_dir", ""),
        ttl_s=_ttl_s("redis", values),
    )


def _integer(name: str, values: Mapping[str, str], key: str, *, minimum: int, default: int | None = None) -> int:
    text = values.get(key)
    if text is None:
        assert default is not None, "the caller has looked"
        return default
    try:
        number = parse_int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise InvalidArgumentError(f"{_FLAG}={name},{key} expects an integer of at least {minimum}, got '{text}'")
    return number


def _milliseconds(values: Mapping[str, str], key: str, default_s: float) -> float:
    """A time in seconds. Triton's 0 means to wait for ever, which is not supported here: it gives the default."""
    return _integer("redis", values, key, minimum=0, default=0) / 1000 or default_s


def _ttl_s(name: str, values: Mapping[str, str]) -> float | None:
    text = values.get("ttl")
    if text is None:
        return None
    try:
        ttl_s = parse_float(text)
    except ValueError:
        ttl_s = 0.0
    if not 0 < ttl_s < 1e9:
        raise InvalidArgumentError(f"{_FLAG}={name},ttl expects seconds, more than 0, got '{text}'")
    return ttl_s


def _boolean(values: Mapping[str, str], key: str) -> bool:
    switch = parse_bool(values.get(key, "false"))
    if switch is None:
        raise InvalidArgumentError(f"{_FLAG}=redis,{key} expects {BOOL_EXPECTATION}, got '{values[key]}'")
    return switch
