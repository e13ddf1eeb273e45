"""Model repositories in memory, by fsspec's memory://, and on an S3 server of this process."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec
from support.repositories import IDENTITY_CONFIG

from modelserver.store.cloud_store import CloudStore, Listing, RemoteFile
from modelserver.store.cloud_uri import parse_cloud_uri


class MemoryBucket:
    """A tree of files at `memory://<name>`, gone when the test is over."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uri = parse_cloud_uri(f"memory://{name}/models")
        self._files = fsspec.filesystem("memory")

    def write(self, path: str, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else content
        self._files.pipe(f"/{self.name}/models/{path}", data)

    def make_directory(self, path: str) -> None:
        self._files.makedirs(f"/{self.name}/models/{path}", exist_ok=True)

    def remove(self, path: str) -> None:
        self._files.rm(f"/{self.name}/models/{path}", recursive=True)

    def write_model(
        self, name: str, *, versions: tuple[int, ...] = (1,), config: str = IDENTITY_CONFIG, extra: str = ""
    ) -> None:
        self.write(f"{name}/config.pbtxt", config + extra)
        for version in versions:
            self.write(f"{name}/{version}/weights", f"weights of {version}")


@contextmanager
def memory_bucket(name: str) -> Iterator[MemoryBucket]:
    bucket = MemoryBucket(name)
    fsspec.filesystem("memory").makedirs(f"/{name}/models", exist_ok=True)
    try:
        yield bucket
    finally:
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


class CountingStore(CloudStore):
    """Counts what is fetched, and fails for the paths that a test says."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(bucket.uri, {})
        self.fetched: list[str] = []
        self.failures: dict[str, Exception] = {}

    def fetch(self, path: str, file: RemoteFile, target: Any) -> None:
        self.fetched.append(path)
        if path in self.failures:
            raise self.failures[path]
        super().fetch(path, file, target)


def listing_of(files: Mapping[str, bytes], *directories: str) -> Listing:
    """A listing of files whose tags are their contents."""
    found = {path: RemoteFile(len(content), content.decode()) for path, content in files.items()}
    return Listing(found, frozenset(directories))


class S3Server:
    """moto's S3 server in this process, with a bucket."""

    def __init__(self, port: int, client: Any) -> None:
        self.address = f"127.0.0.1:{port}"
        self.client = client

    def write(self, key: str, content: bytes | str) -> None:
        self.client.put_object(Bucket="bucket", Key=key, Body=content.encode() if isinstance(content, str) else content)

    def write_model(self, name: str, *, versions: tuple[int, ...] = (1,), extra: str = "") -> None:
        self.write(f"models/{name}/config.pbtxt", IDENTITY_CONFIG + extra)
        for version in versions:
            self.write(f"models/{name}/{version}/weights", f"weights of {version}")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = importlib.import_module("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        client = importlib.import_module("boto3").client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bucket")
        yield S3Server(port, client)
        client.close()
    finally:
        server.stop()
