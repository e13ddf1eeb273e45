"""Manifests: the layers of a model, each a blob with its media type. Nothing in a manifest is trusted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelserver.core.documents import parse_json
from modelserver.errors import InvalidArgumentError, UnsupportedError

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
OCI_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_IMAGE = "application/vnd.ollama.image."
MODEL, ADAPTER, PROJECTOR = _IMAGE + "model", _IMAGE + "adapter", _IMAGE + "projector"
TEMPLATE, SYSTEM, PARAMETERS = _IMAGE + "template", _IMAGE + "system", _IMAGE + "params"
MESSAGES, LICENSE = _IMAGE + "messages", _IMAGE + "license"
# A smaller model, which guesses the tokens of the model.
DRAFT = _IMAGE + "draft"
# A file of a model that is a directory, which its title names.
FILE = "application/octet-stream"
TITLE = "org.opencontainers.image.title"

MAX_MANIFEST_BYTES = 4 << 20
_MAX_LAYERS = 4096
_MAX_BYTES = 1 << 50
_MAX_TITLE_LEN = 1024
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_TITLE_PART = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}")


def check_digest(text: object) -> str:
    """The digest as `sha256:<hex>`. Raises InvalidArgumentError for anything else: digests become names of files."""
    match = _DIGEST.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidArgumentError(f"invalid digest {text!r:.120}: expected sha256: and 64 hexadecimal digits")
    return f"sha256:{match[1]}"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def check_title(title: str) -> str:
    """The path of a file relative to its model. Raises InvalidArgumentError for one that may leave it."""
    parts = title.split("/")
    is_path = all(_TITLE_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    if not is_path or len(title) > _MAX_TITLE_LEN:
        raise InvalidArgumentError(f"invalid file name {title[:200]!r} in a manifest: expected a relative path")
    return title


@dataclass(frozen=True, slots=True)
class Layer:
    """A blob of a model. `title` is the path of a file that the model consists of; empty for other layers."""

    media_type: str
    digest: str
    size_bytes: int
    title: str = ""

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size_bytes}
        return found | ({"annotations": {TITLE: self.title}} if self.title else {})


@dataclass(frozen=True, slots=True)
class Manifest:
    """`content` is the manifest as stored, byte for byte: its digest is the model's id."""

    layers: tuple[Layer, ...]
    config: Layer | None = None
    content: bytes = field(default=b"", repr=False)

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def size_bytes(self) -> int:
        """The bytes of all blobs."""
        return sum(layer.size_bytes for layer in self.blobs)

    @property
    def blobs(self) -> tuple[Layer, ...]:
        """Every layer, and the config, each digest once."""
        layers = (*self.layers, *([self.config] if self.config is not None else []))
        return tuple({layer.digest: layer for layer in layers}.values())

    def of_type(self, media_type: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.media_type == media_type)


def make_manifest(layers: Sequence[Layer], config: Layer) -> Manifest:
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": config.document(),
        "layers": [layer.document() for layer in layers],
    }
    return Manifest(tuple(layers), config, json.dumps(document, separators=(",", ":")).encode())


def parse_manifest(content: bytes, source: str) -> Manifest:
    """Read a manifest of Docker's or OCI's form.

    Raises InvalidArgumentError for anything malformed, UnsupportedError for an index of several images.
    """
    if len(content) > MAX_MANIFEST_BYTES:
        raise InvalidArgumentError(f"{source}: the manifest is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        document = parse_json(content, source)
    except ValueError as error:
        raise InvalidArgumentError(f"{source}: the manifest is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"{source}: expected a manifest, got {type(document).__name__}")
    if "manifests" in document and "layers" not in document:
        raise UnsupportedError(f"{source} is an index of several images: name one of them")
    entries = document.get("layers")
    if document.get("schemaVersion") != 2 or not isinstance(entries, list) or not entries:
        raise InvalidArgumentError(f"{source}: expected a manifest of schema version 2 with layers")
    if len(entries) > _MAX_LAYERS:
        raise InvalidArgumentError(f"{source}: the manifest has {len(entries)} layers, more than {_MAX_LAYERS}")
    layers = tuple(_parse_layer(entry, source) for entry in entries)
    titles = [layer.title for layer in layers if layer.title]
    if len(set(titles)) < len(titles):
        raise InvalidArgumentError(f"{source}: two layers of the manifest have the same file name")
    config = document.get("config")
    return Manifest(layers, _parse_layer(config, source) if config else None, content)


def _parse_layer(entry: object, source: str) -> Layer:
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"{source}: a layer of the manifest is {type(entry).__name__}, not an object")
    media_type, size, annotations = entry.get("mediaType"), entry.get("size"), entry.get("annotations") or {}
    if not isinstance(media_type, str) or not isinstance(size, int) or not 0 <= size <= _MAX_BYTES:
        raise InvalidArgumentError(f"{source}: a layer of the manifest has no media type or no valid size")
    title = annotations.get(TITLE, "") if isinstance(annotations, Mapping) else ""
    try:
        return Layer(media_type, check_digest(entry.get("digest")), size, check_title(title) if title else "")
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{source}: {error.message}") from None
    except (AttributeError, TypeError):
        raise InvalidArgumentError(f"{source}: the title of a layer is not a text") from None
