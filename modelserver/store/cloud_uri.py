"""Names of model repositories in object stores, in Triton's forms and those of fsspec, and their credentials.

s3://bucket/prefix   s3://host:port/bucket/prefix   s3://https://host:port/bucket/prefix
gs://bucket/prefix   as://account/container/prefix   abfs://container@account.dfs.core.windows.net/prefix
memory://name        (of this process; for tests)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelserver.core.documents import parse_json
from modelserver.errors import InvalidArgumentError

# As in Triton, where an endpoint has a port, so that it can be told from a bucket.
_ENDPOINT = re.compile(r"(?:(https?)://)?([0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):([0-9]+)/(.+)")
_ABFS = re.compile(r"([^@/]+)@([^./]+)\.[^/]*(?:/(.*))?")
_SCHEMES = ("s3", "gs", "as", "abfs", "abfss", "memory")


@dataclass(frozen=True, slots=True)
class CloudUri:
    """The place of a repository: fsspec's `protocol`, the `path` in it, and `settings` derived from the address.

    `text` is the operator's text, `scheme` the part of it that Triton's credentials file uses as a key.
    """

    text: str
    scheme: str
    protocol: str
    path: str
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the path, like the name of a directory."""
        return self.path.rpartition("/")[2]


def is_cloud_uri(text: str) -> bool:
    """Whether a `--model-repository` is in an object store."""
    return text.partition("://")[0] in _SCHEMES and "://" in text


def parse_cloud_uri(text: str, what: str = "model repository") -> CloudUri:
    """Parse an address of `what`. Raises InvalidArgumentError if it has none of the forms."""
    return _checked(_parse(text), what)


def _parse(text: str) -> CloudUri:
    scheme, _, rest = text.partition("://")
    rest = rest.rstrip("/")
    if scheme == "s3":
        return _parse_s3(text, rest)
    if scheme == "as":
        account, _, path = rest.partition("/")
        return CloudUri(text, "as", "abfs", path, {"account_name": account})
    if scheme in ("abfs", "abfss"):
        match = _ABFS.fullmatch(rest)
        if match is None:
            return CloudUri(text, "as", "abfs", rest)
        container, account, prefix = match.groups()
        return CloudUri(text, "as", "abfs", _join(container, prefix or ""), {"account_name": account})
    protocol = {"gs": "gcs"}.get(scheme, scheme)
    return CloudUri(text, scheme, protocol, rest)


def _parse_s3(text: str, rest: str) -> CloudUri:
    match = _ENDPOINT.fullmatch(rest)
    if match is None:
        return CloudUri(text, "s3", "s3", rest)
    protocol, host, port, path = match.groups()
    settings = {"endpoint_url": f"{protocol or 'http'}://{host}:{port}"}
    return CloudUri(text, "s3", "s3", path, settings)


def _checked(uri: CloudUri, what: str) -> CloudUri:
    if not uri.path or any(part in ("", ".", "..") for part in uri.path.split("/")):
        expected = {"s3": "s3://[[https://]host:port/]bucket[/prefix]", "as": "as://account/container[/prefix]"}
        raise InvalidArgumentError(
            f"{what} '{uri.text}': expected {expected.get(uri.scheme, f'{uri.scheme}://bucket[/prefix]')}"
        )
    return uri


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"

# Triton's key -> the argument of the file system's library.
_S3_KEYS = {"key_id": "key", "secret_key": "secret", "session_token": "token", "profile": "profile"}
_AZURE_KEYS = {"account_str": "account_name", "account_key": "account_key"}


def storage_options(uri: CloudUri, environment: Mapping[str, str]) -> dict[str, Any]:
    """The arguments to open the file system of `uri`. Raises InvalidArgumentError for an invalid credentials file.

    The libraries find all other settings themselves, as their clouds' own tools do.
    """
    path = environment.get(VARIABLE, "")
    found = _credential(uri, Path(path)) if path else None
    return {**_from_environment(uri, environment), **_arguments(uri, found), **uri.settings}


def _credential(uri: CloudUri, path: Path) -> object:
    """The entry of the longest prefix; None if there is none."""
    try:
        document = parse_json(path.read_bytes(), f"{VARIABLE}={path}")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{VARIABLE}={path} cannot be read: {error}") from error
    entries = document.get(uri.scheme, {}) if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise InvalidArgumentError(f"{VARIABLE}={path}: expected an object of prefixes under '{uri.scheme}'")
    prefixes = [prefix for prefix in entries if uri.text.startswith(prefix)]
    return entries[max(prefixes, key=len)] if prefixes else None


def _arguments(uri: CloudUri, credential: object) -> dict[str, Any]:
    if credential is None:
        return {}
    if uri.scheme == "gs":
        if not isinstance(credential, str):
            raise InvalidArgumentError(f"{VARIABLE}: expected a path for '{uri.text}', got {type(credential).__name__}")
        return {"token": credential} if credential else {}
    if not isinstance(credential, dict):
        raise InvalidArgumentError(f"{VARIABLE}: expected an object for '{uri.text}', got {type(credential).__name__}")
    keys = _S3_KEYS if uri.scheme == "s3" else _AZURE_KEYS
    unknown = credential.keys() - keys.keys() - {"region"}
    if unknown:
        raise InvalidArgumentError(
            f"{VARIABLE}: unknown keys {sorted(unknown)} for '{uri.text}'; expected some of {', '.join(keys)}"
        )
    arguments: dict[str, Any] = {keys[key]: value for key, value in credential.items() if key in keys and value}
    if uri.scheme == "s3" and credential.get("region"):
        arguments["client_kwargs"] = {"region_name": credential["region"]}
    return arguments


def _from_environment(uri: CloudUri, environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings in Triton's variables that the libraries do not read. AWS's and Google's libraries read their own."""
    if uri.scheme != "as":
        return {}
    variables = {"AZURE_STORAGE_ACCOUNT": "account_name", "AZURE_STORAGE_KEY": "account_key"}
    return {argument: environment[name] for name, argument in variables.items() if environment.get(name)}
