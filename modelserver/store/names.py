"""Names of models as Ollama writes them, and the other places that a model may come from.

[host/][namespace/]model[:tag]    a registry; without a host Ollama's, without a namespace `library`
hf.co/organisation/model[:quant]  the hub of Hugging Face
file:PATH  ./PATH  /PATH          a file or a directory of this machine
http(s)://...                     a single file
s3://... gs://... as://...        a file or a directory in an object store
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from modelserver.errors import InvalidArgumentError

DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG = "registry.ollama.ai", "library", "latest"
HUB_HOST = "hf.co"
_HUB_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?")

_HOST = re.compile(r"(?=.{1,350}$)([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_PARTS = {"host": _HOST, "namespace": _NAMESPACE, "model": _MODEL, "tag": _TAG}
_FORM = "[host/][namespace/]model[:tag]"
# Stands for a slash in the names of a model repository, which become directories and segments of URLs. No part of a
# model's name has it.
_SLASH = "~"


@dataclass(frozen=True, slots=True, order=True)
class ModelName:
    """A complete name. Every part is checked, so that it can be a directory."""

    host: str
    namespace: str
    model: str
    tag: str

    def __post_init__(self) -> None:
        for what, pattern in _PARTS.items():
            part = getattr(self, what)
            if not pattern.fullmatch(part) or ".." in part:
                raise InvalidArgumentError(f"invalid model name: '{part[:100]}' cannot be its {what}; expected {_FORM}")

    def __str__(self) -> str:
        """The name without the parts that are Ollama's defaults, but with its tag."""
        return f"{self._untagged}:{self.tag}"

    @property
    def short(self) -> str:
        """The name without any part that is a default."""
        return self._untagged if self.tag == DEFAULT_TAG else str(self)

    @property
    def repository_name(self) -> str:
        """What the model is called in a model repository: `short`, with `~` for each slash."""
        return self.short.replace("/", _SLASH)

    @property
    def path(self) -> Path:
        """Where its manifest is, below the directory of manifests."""
        return Path(self.host, self.namespace, self.model, self.tag)

    @property
    def is_on_hub(self) -> bool:
        return self.host == HUB_HOST

    @property
    def _untagged(self) -> str:
        if self.host != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{self.model}"
        return self.model if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{self.model}"


def parse_name(text: str) -> ModelName:
    """Complete a name with Ollama's defaults. Raises InvalidArgumentError."""
    rest = text.strip()
    if not rest:
        raise InvalidArgumentError(f"the name of the model is empty; expected {_FORM}")
    tag = DEFAULT_TAG
    if ":" in rest.rpartition("/")[2]:
        rest, _, tag = rest.rpartition(":")
    parts = rest.split("/")
    if len(parts) > 3:
        raise InvalidArgumentError(f"invalid model name '{text[:200]}': expected {_FORM}")
    model = parts.pop()
    namespace = parts.pop() if parts else DEFAULT_NAMESPACE
    host = parts.pop() if parts else DEFAULT_HOST
    try:
        return ModelName(HUB_HOST if host.lower() in _HUB_HOSTS else host, namespace, model, tag)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"'{text[:200]}': {error.message}") from None


def is_loopback(host: str) -> bool:
    """Whether a host with or without a port is this machine, so that it may be asked without TLS."""
    return _LOOPBACK.fullmatch(host) is not None


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A file or a directory of this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class UrlPlace:
    """One file behind an address of HTTP."""

    url: str


@dataclass(frozen=True, slots=True)
class CloudPlace:
    """A file or a directory in an object store."""

    address: str


Place = ModelName | FilePlace | UrlPlace | CloudPlace


def parse_place(text: str) -> Place:
    """Where the text says that a model is. Raises InvalidArgumentError."""
    scheme, separator, rest = text.partition("://")
    if text.startswith("file:"):
        return FilePlace(Path(unquote(urlsplit(text).path)).expanduser())
    if text.startswith((".", "/", "~")):
        return FilePlace(Path(text).expanduser())
    if not separator:
        return parse_name(text)
    if scheme in ("http", "https"):
        host, _, path = rest.partition("/")
        if host.lower() in _HUB_HOSTS and path.strip("/").count("/") == 1:  # a repository's page
            return parse_name(f"{host}/{path.strip('/')}")
        return UrlPlace(text)
    if scheme == "hf":
        return parse_name(f"{HUB_HOST}/{rest.strip('/')}")
    return CloudPlace(text)


def name_of_place(place: Place) -> ModelName:
    """What a model from there is called unless the caller names it: after the last part of the path.

    Raises InvalidArgumentError for a path without one that could be a name.
    """
    if isinstance(place, ModelName):
        return place
    if isinstance(place, FilePlace):
        last = place.path.resolve().name
    elif isinstance(place, UrlPlace):
        last = unquote(urlsplit(place.url).path).rstrip("/").rpartition("/")[2]
    else:
        last = place.address.rstrip("/").rpartition("/")[2]
    stem, dot, ending = last.rpartition(".")
    stem = stem if dot and ending.lower() in ("gguf", "onnx", "pt2", "safetensors") else last
    try:
        return parse_name(re.sub(r"[^A-Za-z0-9_.-]+", "-", stem))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error.message}; give the model a name of its own") from None
