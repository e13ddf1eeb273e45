"""Credentials for object stores: from Triton's file, or from the environment.

The file that TRITON_CLOUD_CREDENTIAL_PATH names is a JSON object of schemes (`s3`, `gs`, `as`), each with credentials
by prefix of the repository's address; the longest prefix counts, the empty one is for all. It is read at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelserver.core.documents import parse_json
from modelserver.errors import InvalidArgumentError
from modelserver.repository.cloud_uri import CloudUri

VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"

# Triton's key -> the argument of the file system's library.
_S3_KEYS = {"key_id": "key", "secret_key": "secret", "session_token": "token", "profile": "profile"}
_AZURE_KEYS = {"account_str": "account_name", "account_key": "account_key"}


def storage_options(uri: CloudUri, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the file system of `uri` is opened with. Raises InvalidArgumentError for a file that is not right.

    What is not said here the libraries find themselves, as their clouds' own tools do.
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
    """What the libraries do not look for under Triton's names. Those of AWS and Google read their own variables."""
    if uri.scheme != "as":
        return {}
    variables = {"AZURE_STORAGE_ACCOUNT": "account_name", "AZURE_STORAGE_KEY": "account_key"}
    return {argument: environment[name] for name, argument in variables.items() if environment.get(name)}
