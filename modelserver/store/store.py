"""The store: models by name, each a manifest of blobs.

    <store>/manifests/<host>/<namespace>/<model>/<tag>   a manifest; Ollama's layout
    <store>/blobs/...                                    see `blobs`

A directory that Ollama has written is a store, and Ollama can read what is written here. Several processes may use one
store at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from modelserver.core.spelling import did_you_mean, suggest
from modelserver.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError, ServerError
from modelserver.store.blobs import Blobs
from modelserver.store.cloud_store import CloudStore, RemoteFile
from modelserver.store.cloud_uri import parse_cloud_uri, storage_options
from modelserver.store.download import RemoteBlob, download, probe
from modelserver.store.draft import Description, Draft, Recipe, describe
from modelserver.store.hub import find_on_hub
from modelserver.store.manifest import Manifest, check_digest, check_title, parse_manifest
from modelserver.store.names import (
    DEFAULT_HOST,
    DEFAULT_TAG,
    CloudPlace,
    FilePlace,
    ModelName,
    Place,
    UrlPlace,
    name_of_place,
    parse_name,
    parse_place,
)
from modelserver.store.registry import Registry
from modelserver.store.task import StoreTask
from modelserver.store.transport import Transport

STORE_VARIABLE, OLLAMA_VARIABLE = "MODELSERVER_STORE", "OLLAMA_MODELS"
# The address of a mirror of Ollama's registry.
REGISTRY_VARIABLE = "MODELSERVER_REGISTRY"
_NUM_DOWNLOADS = 4
# Files that run code when they are loaded, or make others do so.
_CODE = (
    *(".py", ".pyc", ".so", ".bin", ".pt", ".pt2", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".plan", ".engine"),
    "config.pbtxt",
)


def default_directory() -> Path:
    """The store unless a command names one: that of the environment, else of this user."""
    named = os.environ.get(STORE_VARIABLE) or os.environ.get(OLLAMA_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".modelserver" / "models"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of a store; `modified_s` is the Unix time at which its name was last given."""

    name: ModelName
    manifest: Manifest
    modified_s: float


class Store:
    """A store's models. Methods block, may be called from any thread, and raise ServerError.

    Nothing is written, and no directory made, before the first model comes.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory if directory is not None else default_directory()
        self.blobs = Blobs(self.directory)
        self._manifests = self.directory / "manifests"

    # Reading.

    def names(self) -> list[ModelName]:
        """The names of all models."""
        return sorted(name for name, _ in self.manifest_files())

    def manifest_files(self) -> Iterator[tuple[ModelName, Path]]:
        """The manifests, not read yet. Files whose place is not that of a model are passed over."""
        for path in self._manifests.glob("*/*/*/*"):
            with suppress(InvalidArgumentError):
                name = ModelName(*path.relative_to(self._manifests).parts)
                if path.is_file():
                    yield name, path

    def models(self) -> list[StoredModel]:
        """All models whose manifests can be read, by name."""
        found = []
        for name in self.names():
            with suppress(NotFoundError, InvalidArgumentError):  # removed meanwhile, or damaged
                found.append(self.find(str(name)))
        return found

    def find(self, name: str) -> StoredModel:
        """The model of that name; case does not matter if no other has it exactly. Raises NotFoundError."""
        known = self._existing(parse_name(name))
        path = self._manifests / known.path
        try:
            manifest = parse_manifest(path.read_bytes(), str(path))
            return StoredModel(known, manifest, path.stat().st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            names = [str(each) for each in self.names()]
            hint = did_you_mean(suggest(str(known), names)) or ""
            raise NotFoundError(f"model '{known}' not found in {self.directory}{'; ' + hint if hint else ''}") from None

    def read_manifest(self, name: str) -> Manifest:
        """Raises NotFoundError."""
        return self.find(name).manifest

    def describe(self, name: str) -> Description:
        """The texts of a model. Raises NotFoundError, InvalidArgumentError for a damaged one."""
        return describe(self.read_manifest(name), self.blobs)

    def has_blob(self, digest: str) -> bool:
        """Raises InvalidArgumentError for an invalid digest."""
        return self.blobs.size(digest) is not None

    # Writing.

    def write_blob(self, digest: str, chunks: Iterable[bytes], task: StoreTask | None = None) -> None:
        """Store a blob that a later `create` names. Raises DigestError, StorageFullError, and what `chunks` raises."""
        self.blobs.write(check_digest(digest), chunks, task or StoreTask(), digest)

    def pull(
        self,
        source: str | ModelName,
        *,
        name: str = "",
        task: StoreTask | None = None,
        is_insecure: bool = False,
        is_trusted: bool = False,
    ) -> ModelName:
        """Bring a model into the store from where `source` says (see `names`), called `name` or after its source.

        A text may mean a file of this machine: parse requests of clients as a `ModelName` before. Only missing blobs
        are fetched; an interrupted pull goes on where it stopped. `is_insecure` allows sources without TLS, and
        `is_trusted` files that may run code. Raises ServerError, and CancelledError.
        """
        task = task or StoreTask()
        place = parse_place(source) if isinstance(source, str) else source
        target = parse_name(name) if name else name_of_place(place)
        target = self._existing(target)
        if isinstance(place, ModelName) and not place.is_on_hub:
            self._pull_from_registry(place, target, task, is_insecure, is_trusted)
        elif isinstance(place, FilePlace):
            self.create(str(target), Recipe(path=place.path), task)
        elif isinstance(place, CloudPlace):
            self._pull_from_cloud(place, target, task, is_trusted)
        else:
            self._pull_files(place, target, task, is_insecure, is_trusted)
        task.report("success")
        return target

    def push(self, name: str, *, task: StoreTask | None = None, is_insecure: bool = False) -> None:
        """Upload a model to the registry in its name; blobs that are there already are not sent."""
        task = task or StoreTask()
        stored = self.find(name)
        registry = self._registry(stored.name, is_insecure)
        task.report("retrieving manifest")
        with self.blobs.claim() as claim:
            claim.add(layer.digest for layer in stored.manifest.blobs)
            for layer in stored.manifest.blobs:
                registry.push_blob(layer, self.blobs, task)
        task.report("pushing manifest")
        registry.push_manifest(stored.manifest)
        task.report("success")

    def create(self, name: str, recipe: Recipe, task: StoreTask | None = None) -> ModelName:
        """Make a model by a recipe, in place of any of that name. Raises ServerError."""
        task = task or StoreTask()
        target = self._existing(parse_name(name))
        if sum((bool(recipe.base), recipe.path is not None, bool(recipe.files))) != 1:
            raise InvalidArgumentError(f"'{target}' needs one source: a model, a file or a directory, or blobs")
        if recipe.base and not self._is_stored(recipe.base):
            self.pull(recipe.base, task=task)
        with Draft(self.blobs, task) as draft:
            if recipe.base:
                draft.begin_from(self.read_manifest(recipe.base))
                for path in recipe.more_paths:
                    draft.add_projector(path)
            elif recipe.path is not None:
                draft.add_path(recipe.path, recipe.more_paths)
            else:
                draft.add_files(recipe.files)
            draft.apply(recipe)
            task.report("writing manifest")
            self._write_manifest(target, draft.manifest())
        task.report("success")
        return target

    def copy(self, source: str, target: str) -> ModelName:
        """Give a model a second name, or take that name from another. Raises NotFoundError."""
        manifest = self.read_manifest(source)
        name = self._existing(parse_name(target))
        with self.blobs.claim() as claim:
            claim.add(layer.digest for layer in manifest.blobs)
            self._write_manifest(name, manifest)
        return name

    def remove(self, name: str) -> ModelName:
        """Remove a model, and the blobs that no other needs. Raises NotFoundError."""
        stored = self.find(name)
        path = self._manifests / stored.name.path
        with self.blobs.exclusive():
            path.unlink(missing_ok=True)
            for directory in (path.parent, path.parent.parent, path.parent.parent.parent):
                with suppress(OSError):  # others are in it
                    directory.rmdir()
            self._collect([layer.digest for layer in stored.manifest.blobs])
        return stored.name

    def collect(self) -> int:
        """Remove blobs and partial files that nothing has needed for long; returns the bytes freed."""
        with self.blobs.exclusive():
            return self._collect(None)

    # Implementation.

    def _existing(self, name: ModelName) -> ModelName:
        """The name as the store writes it: names that differ only in case are the same."""
        if (self._manifests / name.path).is_file():
            return name
        folded = str(name.path).lower()
        return next((each for each in self.names() if str(each.path).lower() == folded), name)

    def _is_stored(self, name: str) -> bool:
        with suppress(NotFoundError):
            self.find(name)
            return True
        return False

    def _registry(self, name: ModelName, is_insecure: bool) -> Registry:
        address = os.environ.get(REGISTRY_VARIABLE, "") if name.host == DEFAULT_HOST else ""
        return Registry(name, address=address, is_insecure=is_insecure)

    def _pull_from_registry(
        self, source: ModelName, target: ModelName, task: StoreTask, is_insecure: bool, is_trusted: bool
    ) -> None:
        registry = self._registry(source, is_insecure)
        task.report("pulling manifest")
        manifest = registry.manifest()
        if not is_trusted:
            _check_no_code([layer.title for layer in manifest.layers], str(source))
        with self.blobs.claim() as claim:
            claim.add(layer.digest for layer in manifest.blobs)
            self._download(registry.transport, [registry.remote(layer) for layer in manifest.blobs], task)
            task.report("writing manifest")
            self._write_manifest(target, manifest)

    def _pull_files(
        self, place: Place, target: ModelName, task: StoreTask, is_insecure: bool, is_trusted: bool
    ) -> None:
        """From the hub, or a single file."""
        task.report("pulling manifest")
        transport = Transport(is_insecure=is_insecure)
        file_type = ""
        if isinstance(place, ModelName):
            found = find_on_hub(place)
            remotes = {check_title(file.path): remote for file, remote in found.files}
            if found.is_gguf:
                remotes = {path.rpartition("/")[2]: remote for path, remote in remotes.items()}
            file_type = "" if place.tag == DEFAULT_TAG else place.tag
        else:
            assert isinstance(place, UrlPlace), "places of other kinds are pulled elsewhere"
            title = check_title(unquote(urlsplit(place.url).path).rpartition("/")[2] or "model")
            remotes = {title: probe(transport, place.url, title)}
        if not is_trusted:
            _check_no_code(remotes, str(target))
        with Draft(self.blobs, task) as draft:
            draft.claim.add(remote.digest for remote in remotes.values() if remote.digest is not None)
            digests = self._download(transport, list(remotes.values()), task)
            draft.add_files(dict(zip(remotes, digests, strict=True)))
            if file_type:
                draft.config["file_type"] = file_type
            task.report("writing manifest")
            self._write_manifest(target, draft.manifest())

    def _pull_from_cloud(self, place: CloudPlace, target: ModelName, task: StoreTask, is_trusted: bool) -> None:
        """A file, or all files of a directory in an object store."""
        task.report("listing files")
        store, files = _list_cloud(place.address)
        if not is_trusted:
            _check_no_code(files, place.address)
        self.blobs.check_room(sum(file.size_bytes for _, file in files.values()), place.address)
        with Draft(self.blobs, task) as draft:
            digests = {}
            for title, (path, file) in files.items():
                task.report(f"pulling {title}", title, file.size_bytes, 0)
                temporary = self.blobs.temporary()
                try:
                    store.fetch(path, file, temporary)
                    digests[check_title(title)] = self.blobs.adopt(temporary, task)
                finally:
                    temporary.unlink(missing_ok=True)
                task.report(f"pulling {title}", title, file.size_bytes, file.size_bytes)
                draft.claim.add([digests[title]])
            draft.add_files(digests)
            task.report("writing manifest")
            self._write_manifest(target, draft.manifest())

    def _download(self, transport: Transport, remotes: Sequence[RemoteBlob], task: StoreTask) -> list[str]:
        """The digests of these files, which are in the store then. The first failure cancels the others."""
        missing = [each for each in remotes if each.digest is None or self.blobs.size(each.digest) is None]
        partial = sum(self.blobs.partial_size(each.key) for each in missing)
        self.blobs.check_room(sum(each.size_bytes or 0 for each in missing) - partial, "the model")
        shared = task.part()
        with ThreadPoolExecutor(_NUM_DOWNLOADS, thread_name_prefix="store-download") as pool:
            try:
                jobs = [pool.submit(download, transport, self.blobs, remote, shared) for remote in remotes]
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                failures = [error for job in jobs if job in done and (error := job.exception()) is not None]
                if failures:
                    raise failures[0]
            except BaseException:
                shared.cancel()
                pool.shutdown(cancel_futures=True)
                raise
            return [job.result() for job in jobs]

    def _write_manifest(self, name: ModelName, manifest: Manifest) -> None:
        """Give the name to a model whose blobs are claimed. Blobs that only the model before it needed are removed.

        Raises InvalidArgumentError for a blob that is missing, or whose size is not that of the manifest.
        """
        path = self._manifests / name.path
        with self.blobs.exclusive():
            for layer in manifest.blobs:
                if (size_bytes := self.blobs.size(layer.digest)) != layer.size_bytes:
                    there = "it is missing" if size_bytes is None else f"it has {size_bytes}"
                    raise InvalidArgumentError(
                        f"'{name}': the manifest says {layer.size_bytes} bytes of blob {layer.digest}, but {there}"
                    )
            before: Sequence[str] = ()
            with suppress(OSError, ServerError):
                before = [layer.digest for layer in parse_manifest(path.read_bytes(), str(path)).blobs]
            temporary = self.blobs.temporary()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(manifest.content)
                temporary.replace(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise self.blobs.full_error(error, "the manifest") from error
            self._collect(before)

    def _collect(self, candidates: Sequence[str] | None) -> int:
        """Called in `exclusive`. A manifest that cannot be read may need anything, so nothing is removed then."""
        if candidates is not None and not candidates:
            return 0
        referenced: set[str] = set()
        for _, path in self.manifest_files():
            try:
                referenced |= {layer.digest for layer in parse_manifest(path.read_bytes(), str(path)).blobs}
            except FileNotFoundError:
                continue
            except (OSError, ServerError):
                return 0
        return self.blobs.remove_unreferenced(referenced, candidates)


def _list_cloud(address: str) -> tuple[CloudStore, dict[str, tuple[str, RemoteFile]]]:
    """The files at an address of an object store: by title the path in the returned store, and the file.

    Raises NotFoundError if there are none.
    """
    uri = parse_cloud_uri(address)
    if "/" not in uri.path:
        raise InvalidArgumentError(f"'{address}': name a file or a directory in it")
    parent, _, name = address.rstrip("/").rpartition("/")
    store = CloudStore(parse_cloud_uri(parent), storage_options(uri, os.environ))
    file = store.file(name)
    if file is not None:
        return store, {name: (name, file)}
    files = store.list(name).files.items()
    found = {path: (f"{name}/{path}", each) for path, each in files if not path.startswith(".") and "/." not in path}
    if not found:
        raise NotFoundError(f"there are no files at {address}")
    return store, found


def _check_no_code(titles: Iterable[str], source: str) -> None:
    """Raise PermissionDeniedError for files that may run code. A config may name any other file as such."""
    code = next((title for title in titles if title.lower().endswith(_CODE)), None)
    if code is not None:
        raise PermissionDeniedError(
            f"'{source}' has the file '{code}', which may run code when it is loaded, and is not fetched; if you trust "
            "it: modelserver pull --trust"
        )
