"""Names of model repositories in object stores, in Triton's forms and those of fsspec.

s3://bucket/prefix   s3://host:port/bucket/prefix   s3://https://host:port/bucket/prefix
gs://bucket/prefix   as://account/container/prefix   abfs://container@account.dfs.core.windows.net/prefix
memory://name        (of this process; for tests)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserver.errors import InvalidArgumentError

# As in Triton, where an endpoint has a port, so that it can be told from a bucket.
_ENDPOINT = re.compile(r"(?:(https?)://)?([0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):([0-9]+)/(.+)")
_ABFS = re.compile(r"([^@/]+)@([^./]+)\.[^/]*(?:/(.*))?")
_SCHEMES = ("s3", "gs", "as", "abfs", "abfss", "memory")


@dataclass(frozen=True, slots=True)
class CloudUri:
    """Where a repository is: fsspec's `protocol`, the `path` in it, and `settings` that follow from the address.

    `text` is what the operator wrote, `scheme` the part of it that Triton's credentials are filed under.
    """

    text: str
    scheme: str
    protocol: str
    path: str
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part, as of a directory."""
        return self.path.rpartition("/")[2]


def is_cloud_uri(text: str) -> bool:
    """Whether a `--model-repository` is in an object store."""
    return text.partition("://")[0] in _SCHEMES and "://" in text


def parse_cloud_uri(text: str) -> CloudUri:
    """Raises InvalidArgumentError for an address that is in none of the forms."""
    scheme, _, rest = text.partition("://")
    rest = rest.rstrip("/")
    if scheme == "s3":
        return _parse_s3(text, rest)
    if scheme == "as":
        account, _, path = rest.partition("/")
        return _checked(CloudUri(text, "as", "abfs", path, {"account_name": account}))
    if scheme in ("abfs", "abfss"):
        match = _ABFS.fullmatch(rest)
        if match is None:
            return _checked(CloudUri(text, "as", "abfs", rest))
        container, account, prefix = match.groups()
        return _checked(CloudUri(text, "as", "abfs", _join(container, prefix or ""), {"account_name": account}))
    protocol = {"gs": "gcs"}.get(scheme, scheme)
    return _checked(CloudUri(text, scheme, protocol, rest))


def _parse_s3(text: str, rest: str) -> CloudUri:
    match = _ENDPOINT.fullmatch(rest)
    if match is None:
        return _checked(CloudUri(text, "s3", "s3", rest))
    protocol, host, port, path = match.groups()
    settings = {"endpoint_url": f"{protocol or 'http'}://{host}:{port}"}
    return _checked(CloudUri(text, "s3", "s3", path, settings))


def _checked(uri: CloudUri) -> CloudUri:
    if not uri.path or any(part in ("", ".", "..") for part in uri.path.split("/")):
        expected = {"s3": "s3://[[https://]host:port/]bucket[/prefix]", "as": "as://account/container[/prefix]"}
        raise InvalidArgumentError(
            f"model repository '{uri.text}': expected {expected.get(uri.scheme, f'{uri.scheme}://bucket[/prefix]')}"
        )
    return uri


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
