"""An S3 repository on moto's server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cloud import S3Server, s3_server
from support.repositories import infer, open_repository

from modelserver.errors import UnavailableError
from modelserver.repository.options import ControlMode
from modelserver.store.cloud_uri import VARIABLE, parse_cloud_uri

pytestmark = [
    # botocore and moto use what Python will drop one day.
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    return server


async def test_models_are_listed_fetched_and_followed(s3: S3Server, tmp_path: Path) -> None:
    s3.write_model("m")
    s3.write("models/folder/1/", "")  # what a console makes of an empty folder
    uri = parse_cloud_uri(f"s3://http://{s3.address}/bucket/models")
    options = {"cloud_cache_directory": tmp_path / "cache", "control_mode": ControlMode.POLL}
    async with open_repository(uri, **options) as repository:
        await infer(repository, "m")
        model = repository.get("m", None)
        assert {row.name for row in repository.index()} == {"folder", "m"}
        s3.write_model("m")  # the same content under the same tag
        s3.write_model("big", versions=(3,))
        s3.write("models/big/3/weights", b"x" * 3_000_000)
        for _ in range(2):
            await repository._poller.poll_once()
            await repository._poller.wait_idle()
        assert repository.get("m", None) is model
        directory = repository._lifecycles["big"].loaded[3].definition.versions[3]
        assert (directory / "weights").stat().st_size == 3_000_000
        s3.write("models/m/1/weights", "other weights")
        for _ in range(2):
            await repository._poller.poll_once()
            await repository._poller.wait_idle()
        assert repository.get("m", None) is not model
        await infer(repository, "m")


async def test_credentials_of_tritons_file(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.write_model("m")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}")
    text = f"s3://{s3.address}/bucket/models"
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps({"s3": {"": {"profile": "none"}, text: {"key_id": "key", "secret_key": "secret"}}}))
    monkeypatch.setenv(VARIABLE, str(path))
    async with open_repository(
        parse_cloud_uri(text), cloud_cache_directory=tmp_path / "cache", load_models=("m",)
    ) as repository:
        await infer(repository, "m")


async def test_a_bucket_that_is_not_there(s3: S3Server, tmp_path: Path) -> None:
    uri = parse_cloud_uri(f"s3://{s3.address}/missing/models")
    with pytest.raises(UnavailableError, match=r"'s3://.*/missing/models' cannot be listed: FileNotFoundError"):
        async with open_repository(uri, cloud_cache_directory=tmp_path / "cache"):
            pass
