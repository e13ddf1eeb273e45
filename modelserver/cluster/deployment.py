"""The file of `modelserver deploy`: pools of identical servers, what each needs, and how many there should be.

The documents are `msgspec` structs: a field that is missing, unknown or of another type is refused with its place.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec
import yaml

from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import Option
from modelserver.options.router_options import router_table
from modelserver.options.sources import parse_arguments
from modelserver.options.table import option_table

DEFAULT_DISCOVERY_PORT: Final = 8003

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{0,39}$")]

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(Ki|Mi|Gi|Ti|)B?")
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
# Flags that a replica's host gives itself: it chooses the ports and reads them from what the server prints.
_OWN_FLAGS = frozenset(
    {
        *("host", "http_address", "grpc_address", "metrics_address", "http_port", "grpc_port", "metrics_port"),
        *("allow_http", "allow_grpc", "shared_ports", "reuse_http_port", "reuse_grpc_port", "log_format", "log_file"),
        *("nnodes", "node_rank", "master_addr", "master_port"),
    }
)
_ROUTERS_OWN_FLAGS = frozenset(
    {
        *("to", "discover", "http_port", "grpc_port", "metrics_port", "reuse_http_port", "reuse_grpc_port"),
        *("allow_http", "allow_metrics", "shared_ports", "log_format", "log_file"),
    }
)
_TLS_FLAGS = frozenset({"tls_cert", "tls_key", "tls_client_ca", "grpc_use_ssl", "grpc_use_ssl_mutual"})


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one replica owns. `memory` is a number of bytes, or text such as 2Gi; `custom` are resources that the
    operator gave to nodes of the cluster, by name. With `nodes` above 1 it owns so much of each of as many nodes, which
    share the ranks of its language models."""

    cpus: _Amount = 1.0
    gpus: _Amount = 0.0
    memory: int | str = 0
    custom: dict[str, _Amount] = {}
    nodes: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1

    def __post_init__(self) -> None:
        if not (self.memory_bytes or self.cpus or self.gpus or any(self.custom.values())) and self.nodes > 1:
            raise ValueError("'nodes' above 1 needs some resource of each: set 'cpus' or 'gpus'")

    @property
    def memory_bytes(self) -> int:
        """Raises ValueError for text that is no size."""
        if isinstance(self.memory, int):
            return self.memory
        match = _BYTES.fullmatch(self.memory.strip())
        if match is None:
            raise ValueError(f"'memory' expects bytes, or a size such as 512Mi or 2Gi, got '{self.memory}'")
        return int(float(match[1]) * _UNITS[match[2]])


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas. `target_ongoing_requests` is the number of requests in flight or waiting that each should
    have; more start after the demand was higher for `upscale_delay_s`, fewer run after it was lower for
    `downscale_delay_s`, and none after there was none for `to_zero_after_s`."""

    min: _Count = 1
    max: _Positive = 1
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    upscale_delay_s: _Seconds = 10.0
    downscale_delay_s: _Seconds = 600.0
    to_zero_after_s: _Seconds = 600.0

    def __post_init__(self) -> None:
        if self.max < self.min:
            raise ValueError(f"'max' must be at least 'min', got {self.max} and {self.min}")


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a change replaces replicas: at most `max_surge` beyond the wanted number, and at most `max_unavailable` of
    these not ready. After `max_failed_starts` failures in a row the previous servers come back."""

    max_surge: _Count = 1
    max_unavailable: _Count = 0
    start_timeout_s: _Seconds = 300.0
    max_failed_starts: _Positive = 2
    drain_timeout_s: _Seconds = 60.0

    def __post_init__(self) -> None:
        if not self.max_surge and not self.max_unavailable:
            raise ValueError("'max_surge' and 'max_unavailable' cannot both be 0: no replica could be replaced")


class Routers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Routers of a pool that the cluster starts: `count` of them, on different nodes if there are enough, with the same
    ports on each; 0 takes any. `flags` are those of `modelserver route`, `resources` those of each."""

    count: _Positive = 1
    http_port: _Port = 8000
    grpc_port: _Port = 8001
    metrics_port: _Port = 8002
    flags: list[str] = []
    resources: Resources = Resources()

    def __post_init__(self) -> None:
        _check_flags(self.flags, router_table(), _ROUTERS_OWN_FLAGS, "give it to a router that you start yourself")
        if self.resources.nodes > 1:
            raise ValueError("'resources.nodes' of a router must be 1")


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas of one kind. `version` is the operator's word for what `repository` holds: a change of it replaces the
    replicas, as a change of the flags does. `routers` are those of this pool: the HTTP addresses of routers that the
    operator starts, or what the cluster needs to start them."""

    command: ClassVar[str] = "serve"

    name: _Name
    repository: str | list[str]
    flags: list[str] = []
    env: dict[str, str] = {}
    version: str = ""
    resources: Resources = Resources()
    placement: Literal["spread", "pack"] = "spread"
    replicas: Replicas = Replicas()
    rollout: Rollout = Rollout()
    routers: list[str] | Routers = []

    def __post_init__(self) -> None:
        if not self.repositories:
            raise ValueError("'repository' is empty")
        _check_flags(self.flags, option_table(), _OWN_FLAGS, "give the certificate to the router")
        for url in self.router_urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"'routers' expects http://HOST:PORT, got '{url}'")
        if not self.replicas.min and not self.routers:
            raise ValueError(
                "'replicas.min' of 0 needs 'routers': the requests that wait there start the first replica"
            )

    @property
    def router_urls(self) -> list[str]:
        """The addresses of routers that the operator starts."""
        return [] if isinstance(self.routers, Routers) else self.routers

    @property
    def repositories(self) -> list[str]:
        return [self.repository] if isinstance(self.repository, str) else self.repository

    @property
    def revision(self) -> str:
        """Equal for equal servers: a change of what it covers replaces the replicas, another change does not."""
        parts = (self.repositories, self.flags, sorted(self.env.items()), self.version, self.resources, self.placement)
        return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:8]

    @property
    def words(self) -> list[str]:
        """The arguments of the command, but for the host."""
        return [
            *("--http-port=0", "--grpc-port=0", "--metrics-port=0"),
            *(f"--model-repository={each}" for each in self.repositories),
            *self.flags,
        ]

    def router_pool(self, url: str) -> RouterPool | None:
        """The routers that the cluster starts, as a pool of their own; `url` is where they find the replicas."""
        own = self.routers
        if not isinstance(own, Routers):
            return None
        waits = [] if self.replicas.min else [f"--wait-for-replica-secs={self.rollout.start_timeout_s:g}"]
        return RouterPool(
            router_name(self.name),
            url,
            flags=[
                *(f"--http-port={own.http_port}", f"--grpc-port={own.grpc_port}", f"--metrics-port={own.metrics_port}"),
                *waits,
                *own.flags,
            ],
            resources=own.resources,
            replicas=Replicas(min=own.count, max=own.count),
        )


class RouterPool(Pool, frozen=True):
    """The routers of a pool, whose `repository` is where they find its replicas. Not of a deployment file."""

    command: ClassVar[str] = "route"

    def __post_init__(self) -> None:
        """They were checked as `Routers`."""

    @property
    def words(self) -> list[str]:
        # A router that takes over from another one of its node has its ports before that one has let them go.
        return [
            *(f"--discover={each}" for each in self.repositories),
            *("--reuse-http-port=true", "--reuse-grpc-port=true"),
            *self.flags,
        ]


def router_name(pool: str) -> str:
    """Of the pool of the routers of a pool."""
    return f"{pool}-router"


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All pools of a cluster. Routers find the replicas of a pool at `discovery_port` of the head node."""

    pools: list[Pool]
    discovery_port: _Port = DEFAULT_DISCOVERY_PORT

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"'pools' has two of the name '{name}'")
        for pool in self.pools:
            if isinstance(pool.routers, Routers) and router_name(pool.name) in names:
                raise ValueError(f"'{router_name(pool.name)}' is the name of the routers of pool '{pool.name}'")

    def find(self, name: str) -> Pool | None:
        return next((pool for pool in self.pools if pool.name == name), None)


def read_deployment(path: Path) -> Deployment:
    """The deployment of a YAML or TOML file. Paths of repositories are relative to the file.

    Raises InvalidArgumentError, with the place of what is wrong.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read '{path}': {error}") from None
    try:
        document = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"{path}: {error}") from None
    deployment = parse_deployment(document, str(path))
    base = path.resolve().parent
    pools = [msgspec.structs.replace(pool, repository=_absolute(pool, base)) for pool in deployment.pools]
    return msgspec.structs.replace(deployment, pools=pools)


def parse_deployment(document: object, source: str) -> Deployment:
    """Raises InvalidArgumentError, which begins with `source` and the field."""
    try:
        return msgspec.convert(document, Deployment)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".")
        raise InvalidArgumentError(f"{source}: {f'{field}: ' if field else ''}{what}") from None


def changes(before: Deployment | None, after: Deployment) -> Iterator[str]:
    """What deploying `after` does, a sentence for each pool."""
    for pool in after.pools:
        old = before.find(pool.name) if before is not None else None
        if old is None:
            yield f"pool {pool.name}: start {pool.replicas.min} to {pool.replicas.max} replicas ({pool.revision})"
            continue
        names = [name for name in Pool.__struct_fields__ if getattr(old, name) != getattr(pool, name)]
        if old.revision != pool.revision:
            revisions = f"{old.revision} -> {pool.revision}"
            yield f"pool {pool.name}: replace the replicas ({revisions}): {', '.join(names)} changed"
        elif names:
            yield f"pool {pool.name}: keep the replicas; {', '.join(names)} changed"
        else:
            yield f"pool {pool.name}: unchanged"
    for pool in before.pools if before is not None else ():
        if after.find(pool.name) is None:
            yield f"pool {pool.name}: drain and stop all replicas"


def _absolute(pool: Pool, base: Path) -> list[str]:
    return [each if "://" in each else str((base / each).resolve()) for each in pool.repositories]


def _check_flags(flags: list[str], table: Sequence[Option], own: frozenset[str], instead_of_tls: str) -> None:
    for index, word in enumerate(flags):
        if not word.startswith("--"):
            raise ValueError(f"'flags[{index}]' expects --NAME or --NAME=VALUE, got '{word}'")
        try:
            (name,) = parse_arguments([word], table)
        except InvalidArgumentError as error:
            raise ValueError(f"'flags[{index}]': {error.message}") from None
        if name in own:
            raise ValueError(f"'flags[{index}]': {word.partition('=')[0]} is set by the cluster")
        if name in _TLS_FLAGS:
            raise ValueError(
                f"'flags[{index}]': {word.partition('=')[0]} is not supported: the cluster asks its servers over "
                f"plain HTTP in its own network; {instead_of_tls}"
            )
        if name in ("model_repository", "config"):
            raise ValueError(f"'flags[{index}]': say {word.partition('=')[0]} by the fields and flags of this file")
