"""A model store as a root of the repository: a directory of links to blobs, in the layout of a repository.

    <view>/<name>/config.pbtxt    says that the model is loaded on demand
    <view>/<name>/1/<files>       links to blobs
    <view>/<name>/1/Modelfile     the model's template, system message and parameters, if it has any
    <view>/<name>/.manifest       the digest of the manifest that the directory shows

The names are those of `ModelName.repository_name`. Several servers may keep the same view: a directory is made under
another name and renamed, and shows one manifest for good.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from modelserver.config.modelfile import FILENAME as MODELFILE
from modelserver.errors import ServerError, UnavailableError
from modelserver.repository.namespaces import name_problem
from modelserver.store.manifest import ADAPTER, DRAFT, MODEL, PROJECTOR, Layer, Manifest, parse_manifest
from modelserver.store.names import ModelName
from modelserver.store.store import Store

logger = logging.getLogger(__name__)

STORED_NAME = "stored_name"
_CONFIG, _MARKER = "config.pbtxt", ".manifest"
_IN_VERSION = re.compile(r"\d+/")


@dataclass(slots=True)
class StoreChanges:
    """Names of models whose content is another one, or that are gone or new."""

    changed: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)


class StoreRoot:
    """Keeps the view of one store. Methods block."""

    def __init__(self, store: Store) -> None:
        """Raises UnavailableError if there is no directory that can be written for the view."""
        self.store = store
        self.path = self._writable()
        self._seen: dict[str, tuple[int, int]] | None = None
        self._changes = StoreChanges()
        self._lock = threading.Lock()  # guards the view and the attributes above

    def sync(self) -> None:
        """Make the view show the store as it is now. Cheap if no manifest has changed. Raises OSError."""
        with self._lock:
            self._sync()

    def _sync(self) -> None:
        manifests = {
            name.repository_name: (name, path)
            for name, path in self.store.manifest_files()
            if name_problem(name.repository_name) is None
        }
        seen = {}
        for key, (_, path) in manifests.items():
            with suppress(FileNotFoundError):
                status = path.stat()
                seen[key] = (status.st_mtime_ns, status.st_size)
        if seen == self._seen:
            return
        present = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")}
        for key in present - seen.keys():
            self._discard(self.path / key)
            self._changes.removed.add(key)
        for key in seen:
            name, path = manifests[key]
            self._show(key, name, path)
        self._seen = seen

    def take_changes(self) -> StoreChanges:
        """The changes since this was called last."""
        with self._lock:
            taken, self._changes = self._changes, StoreChanges()
        return taken

    def _writable(self) -> Path:
        """Beside the blobs; for a store that this user cannot write, in the user's cache."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelserver" / "stores"
        digest = hashlib.sha256(str(self.store.directory.resolve()).encode()).hexdigest()[:16]
        for path in (self.store.directory / "repository", cache / digest):
            with suppress(OSError):
                path.mkdir(parents=True, exist_ok=True)
                if os.access(path, os.W_OK):
                    return path
        raise UnavailableError(
            f"the model store {self.store.directory} cannot be served: neither it nor {cache} can be written"
        )

    def _show(self, key: str, name: ModelName, path: Path) -> None:
        target = self.path / key
        try:
            manifest = parse_manifest(path.read_bytes(), str(path))
            shown = (target / _MARKER).read_text() if (target / _MARKER).is_file() else ""
            if shown == manifest.digest:
                return
            temporary = self.path / f".{uuid.uuid4().hex}"
            try:
                self._make(temporary, name, manifest)
                if target.exists():
                    self._discard(target)
                    self._changes.changed.add(key)
                else:
                    self._changes.added.add(key)
                with suppress(FileExistsError):  # another server was faster
                    temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except (ServerError, OSError) as error:
            logger.warning("model '%s' of the store is left out: %s", name, error)
            if target.exists():
                self._discard(target)
                self._changes.removed.add(key)

    def _make(self, directory: Path, name: ModelName, manifest: Manifest) -> None:
        files = _files(manifest)
        is_whole = any(title == _CONFIG or _IN_VERSION.match(title) for title in files)
        version = directory / "1"
        top = directory if is_whole else version
        version.mkdir(parents=True)
        for title, layer in files.items():
            link = top / title
            link.parent.mkdir(parents=True, exist_ok=True)
            if link != directory / _CONFIG:
                link.symlink_to(os.path.relpath(self.store.blobs.path(layer.digest), link.parent))
        if MODELFILE not in files:
            described = self.store.describe(str(name))
            written = described.modelfile(
                "./model.gguf" if "model.gguf" in files else ".", _parts(files, ADAPTER, 2), _parts(files, DRAFT, 1)
            )
            text = replace(written, licenses=()).text()
            if text.count("\n") > 1:
                (version / MODELFILE).write_text(text)
        given = files.get(_CONFIG)
        config = self.store.blobs.read(given.digest, 1 << 20).decode() if given is not None else ""
        (directory / _CONFIG).write_text(config + _parameters(config, name))
        (directory / _MARKER).write_text(manifest.digest)

    def _discard(self, directory: Path) -> None:
        """Out of the way at once, and then removed."""
        aside = self.path / f".{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            directory.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _files(manifest: Manifest) -> dict[str, Layer]:
    """The layers that are files, by their path in the model's directory. Texts become the Modelfile."""
    found: dict[str, Layer] = {}
    usual_titles = {
        MODEL: "model{}.gguf",
        PROJECTOR: "mmproj{}.gguf",
        ADAPTER: "adapter/{}.gguf",
        DRAFT: "draft/model{}.gguf",
    }
    for media_type, usual in usual_titles.items():
        for number, layer in enumerate(manifest.of_type(media_type)):
            found[layer.title or usual.format(number or ("" if media_type != ADAPTER else 0))] = layer
    return found | {layer.title: layer for layer in manifest.layers if layer.title}


def _parts(files: dict[str, Layer], media_type: str, depth: int) -> list[str]:
    """The paths of the layers of a type, cut to `depth` parts: files, or the directories that hold them."""
    titles = [title for title, layer in files.items() if layer.media_type == media_type]
    return sorted({"./" + "/".join(title.split("/")[:depth]) for title in titles})


def _parameters(config: str, name: ModelName) -> str:
    """What is appended to the model's own config."""
    values = {"load_on_demand": "true"} if "load_on_demand" not in config else {}
    if name.repository_name != name.short:
        values[STORED_NAME] = name.short
    lines = [f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(text)} }} }}"
             for key, text in values.items()]  # fmt: skip
    return "\n" + "\n".join(lines) + "\n"
