import json
from pathlib import Path
from typing import Any

import pytest

from modelserver.errors import InvalidArgumentError
from modelserver.store.cloud_uri import VARIABLE, parse_cloud_uri, storage_options

# The example of Triton's documentation, in its shape.
DOCUMENT = {
    "gs": {"": "/keys/all.json", "gs://bucket-2": "/keys/second.json"},
    "s3": {
        "": {"secret_key": "secret", "key_id": "id", "region": "eu-west-1", "session_token": "", "profile": ""},
        "s3://bucket": {"profile": "short"},
        "s3://bucket/models": {"secret_key": "secret-2", "key_id": "id-2", "session_token": "token"},
    },
    "as": {"": {"account_str": "account", "account_key": "key"}},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://other", {"key": "id", "secret": "secret", "client_kwargs": {"region_name": "eu-west-1"}}),
        ("s3://bucket/x", {"profile": "short"}),
        ("s3://bucket/models/y", {"key": "id-2", "secret": "secret-2", "token": "token"}),
        ("gs://bucket-1", {"token": "/keys/all.json"}),
        ("gs://bucket-2/models", {"token": "/keys/second.json"}),
        ("abfs://container/models", {"account_name": "account", "account_key": "key"}),
        ("as://mine/container", {"account_name": "mine", "account_key": "key"}),
        ("memory://x", {}),
    ],
)
def test_the_longest_prefix_counts(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps(DOCUMENT))
    assert storage_options(parse_cloud_uri(text), {VARIABLE: str(path)}) == expected


def test_the_environment(tmp_path: Path) -> None:
    azure = {"AZURE_STORAGE_ACCOUNT": "account", "AZURE_STORAGE_KEY": "key"}
    expected = {"account_name": "account", "account_key": "key"}
    assert storage_options(parse_cloud_uri("abfs://c/m"), azure) == expected
    assert storage_options(parse_cloud_uri("s3://c/m"), azure | {"AWS_ACCESS_KEY_ID": "read by its library"}) == {}
    endpoint = storage_options(parse_cloud_uri("s3://host:9000/c/m"), {})
    assert endpoint == {"endpoint_url": "http://host:9000"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "expected an object of prefixes under 's3'"),
        ('{"s3": {"": "text"}}', "expected an object for 's3://bucket', got str"),
        ('{"s3": {"": {"keyid": "x"}}}', r"unknown keys \['keyid'\] for 's3://bucket'"),
    ],
)
def test_a_file_that_is_not_right(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "credentials.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=words):
        storage_options(parse_cloud_uri("s3://bucket"), {VARIABLE: str(path)})
