"""The protocol of registries: Ollama's, and that of OCI, of which it is a part."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode, urljoin, urlsplit

from modelserver.errors import InternalError, NotFoundError
from modelserver.store.blobs import Blobs
from modelserver.store.download import RemoteBlob
from modelserver.store.manifest import (
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    OCI_MANIFEST_TYPE,
    Layer,
    Manifest,
    parse_manifest,
)
from modelserver.store.names import ModelName, is_loopback
from modelserver.store.task import StoreTask
from modelserver.store.transport import Body, RegistryTransport

# Larger blobs are pushed in parts.
_PART_BYTES = 64 << 20


class Registry:
    """One model's repository in a registry. `address` replaces that of the host in the model's name, for a mirror."""

    def __init__(self, name: ModelName, *, address: str = "", is_insecure: bool = False) -> None:
        scheme = "http" if is_insecure or is_loopback(name.host) else "https"
        base = (address or f"{scheme}://{name.host}").rstrip("/")
        self.transport = RegistryTransport(is_insecure=is_insecure)
        self._name = name
        self._root = f"{base}/v2/{name.namespace}/{name.model}"

    def manifest(self) -> Manifest:
        """Raises NotFoundError for an unknown model, and as `parse_manifest` and `Transport.open`."""
        url = f"{self._root}/manifests/{self._name.tag}"
        try:
            with self.transport.open("GET", url, {"Accept": f"{MANIFEST_TYPE}, {OCI_MANIFEST_TYPE}"}) as reply:
                content = reply.read_all(MAX_MANIFEST_BYTES)
        except NotFoundError:
            raise NotFoundError(
                f"model '{self._name}' does not exist: {urlsplit(url).netloc} has no manifest {urlsplit(url).path}"
            ) from None
        return parse_manifest(content, f"{urlsplit(url).netloc}: '{self._name}'")

    def remote(self, layer: Layer) -> RemoteBlob:
        """Where a layer of the manifest can be fetched."""
        what = layer.title or layer.digest.removeprefix("sha256:")[:12]
        return RemoteBlob(f"{self._root}/blobs/{layer.digest}", what, layer.digest, layer.size_bytes)

    def push_blob(self, layer: Layer, blobs: Blobs, task: StoreTask) -> None:
        """Upload a blob unless the registry has it. Raises as `Transport.open`, and CancelledError."""
        status = f"pushing {layer.digest.removeprefix('sha256:')[:12]}"
        task.report(status, layer.digest, layer.size_bytes, 0)
        if self._has(layer.digest):
            task.report(status, layer.digest, layer.size_bytes, layer.size_bytes)
            return
        with self.transport.open("POST", f"{self._root}/blobs/uploads/", body=b"") as reply:
            place = urljoin(reply.url, reply.header("Docker-Upload-Location") or reply.header("Location"))
        if not urlsplit(place).path.strip("/"):
            raise InternalError(f"{urlsplit(self._root).netloc} says no place for an upload")
        path, start = blobs.path(layer.digest), 0
        while layer.size_bytes - start > _PART_BYTES:
            body = self._part(task, layer, path, start, _PART_BYTES)
            span = {"Content-Range": f"{start}-{start + _PART_BYTES - 1}"}
            with self.transport.open("PATCH", place, span, body) as reply:
                place = urljoin(place, reply.header("Docker-Upload-Location") or reply.header("Location") or place)
            start += _PART_BYTES
        url = f"{place}{'&' if urlsplit(place).query else '?'}{urlencode({'digest': layer.digest})}"
        span = {"Content-Range": f"{start}-{layer.size_bytes - 1}"} if start else {}
        self.transport.open("PUT", url, span, self._part(task, layer, path, start, layer.size_bytes - start)).close()

    def push_manifest(self, manifest: Manifest) -> None:
        headers = {"Content-Type": MANIFEST_TYPE}
        self.transport.open("PUT", f"{self._root}/manifests/{self._name.tag}", headers, manifest.content).close()

    def _has(self, digest: str) -> bool:
        try:
            self.transport.open("HEAD", f"{self._root}/blobs/{digest}").close()
        except NotFoundError:
            return False
        return True

    @staticmethod
    def _part(task: StoreTask, layer: Layer, path: Path, start: int, size_bytes: int) -> Body:
        status = f"pushing {layer.digest.removeprefix('sha256:')[:12]}"

        def report(num_bytes: int) -> None:
            task.report(status, layer.digest, layer.size_bytes, start + num_bytes)

        return Body(path, start, size_bytes, report)
