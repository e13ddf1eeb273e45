import pytest

from modelserver.errors import InvalidArgumentError
from modelserver.store.cloud_uri import is_cloud_uri, parse_cloud_uri


@pytest.mark.parametrize(
    ("text", "scheme", "protocol", "path", "settings"),
    [
        ("s3://bucket", "s3", "s3", "bucket", {}),
        ("s3://bucket/some/models/", "s3", "s3", "bucket/some/models", {}),
        ("s3://localhost:9000/bucket/models", "s3", "s3", "bucket/models", {"endpoint_url": "http://localhost:9000"}),
        ("s3://http://10.0.0.1:9000/b", "s3", "s3", "b", {"endpoint_url": "http://10.0.0.1:9000"}),
        ("s3://https://minio.example:443/b/m", "s3", "s3", "b/m", {"endpoint_url": "https://minio.example:443"}),
        ("s3://[::1]:9000/b", "s3", "s3", "b", {"endpoint_url": "http://[::1]:9000"}),
        ("gs://bucket/models", "gs", "gcs", "bucket/models", {}),
        ("as://account/container/models", "as", "abfs", "container/models", {"account_name": "account"}),
        (
            "abfss://container@account.dfs.core.windows.net/models",
            "as",
            "abfs",
            "container/models",
            {"account_name": "account"},
        ),
        ("abfs://container/models", "as", "abfs", "container/models", {}),
        ("memory://name/models", "memory", "memory", "name/models", {}),
    ],
)
def test_forms(text: str, scheme: str, protocol: str, path: str, settings: dict[str, str]) -> None:
    uri = parse_cloud_uri(text)
    assert (uri.scheme, uri.protocol, uri.path, dict(uri.settings)) == (scheme, protocol, path, settings)
    assert (uri.text, uri.name) == (text, path.split("/")[-1])
    assert is_cloud_uri(text)


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///bucket", "gs://", "as://account", "s3://bucket//models", "gs://b/../c"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"model repository '{text}': expected"):
        parse_cloud_uri(text)


@pytest.mark.parametrize("text", ["/models", "models", "./s3://x", "file:///models", "s3:bucket"])
def test_paths_are_no_addresses(text: str) -> None:
    assert not is_cloud_uri(text)
