"""A model in the making: files and texts become layers, and layers a manifest."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelserver.config.modelfile import ROLES, Modelfile
from modelserver.config.ollama_options import OPTION_KINDS
from modelserver.core.documents import parse_json
from modelserver.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from modelserver.store.blobs import Blobs
from modelserver.store.manifest import (
    ADAPTER,
    CONFIG_TYPE,
    DRAFT,
    FILE,
    LICENSE,
    MESSAGES,
    MODEL,
    PARAMETERS,
    PROJECTOR,
    SYSTEM,
    TEMPLATE,
    Layer,
    Manifest,
    check_digest,
    check_title,
    make_manifest,
)
from modelserver.store.task import StoreTask

_MAX_TEXT_BYTES = 8 << 20
_GGUF, _GGUF_MAGIC = ".gguf", b"GGUF"
# How the metadata of a projector begins: the key general.architecture, the type of a text, and the text "clip".
_GGUF_HEAD_BYTES = 4096
_PROJECTOR_ENTRY = b"general.architecture" + struct.pack("<IQ", 8, 4) + b"clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Weights in few bits, such as `name` Q4_K_M.

    `write` is given a directory with the weights, one to write model.gguf into, and what to call with the bytes that
    are written and all. Raises ServerError for weights that it cannot read, or that have few bits already.
    """

    name: str
    write: Callable[[Path, Path, Callable[[int, int], None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make a model, as a Modelfile or a request for one says.

    It is made from `base`, the name of a model, which is pulled if it is absent; or from `path`, a file or a directory
    of this machine; or from `files`, digests of blobs by the name of the file that each is. `more_paths` are further
    GGUF files of it, such as a projector. A text that is None is the base's; `parameters` and `config` go over the
    base's own; messages and licenses replace the base's if there are any. With a `quantization` the weights become a
    GGUF file in few bits. Adapters, as blobs (`adapters`) or at `adapter_paths`, are added to the base's own: each GGUF
    file is one, and the other files of one directory or of all blobs are one. A draft model, in `draft_files` or at
    `draft_path`, replaces the base's.
    """

    base: str = ""
    path: Path | None = None
    more_paths: Sequence[Path] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter_paths: Sequence[Path] = ()
    draft_files: Mapping[str, str] = field(default_factory=dict)
    draft_path: Path | None = None
    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    licenses: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Quantization | None = None

    @classmethod
    def of(cls, modelfile: Modelfile, directory: Path) -> Recipe:
        """As a Modelfile in that directory says. Raises UnsupportedError for parts that a store does not keep."""
        if len(modelfile.drafts) > 1:
            raise UnsupportedError("a Modelfile with several DRAFT lines is not supported")
        named = {source: directory / Path(source).expanduser() for source in modelfile.sources}
        paths = [path for text, path in named.items() if path.exists() or text.startswith((".", "/", "~"))]
        bases = [text for text, path in named.items() if path not in paths]
        if len(bases) > 1:
            raise InvalidArgumentError(f"a Modelfile names one model in its FROM lines, not {' and '.join(bases)}")
        kept = {name: value for name in ("renderer", "parser", "requires") if (value := getattr(modelfile, name))}
        return cls(
            base=bases[0] if bases else "",
            path=None if bases else paths[0],
            more_paths=paths if bases else paths[1:],
            adapter_paths=[directory / Path(each).expanduser() for each in modelfile.adapters],
            draft_path=directory / Path(modelfile.drafts[0]).expanduser() if modelfile.drafts else None,
            template=modelfile.template,
            system=modelfile.system,
            parameters=modelfile.parameters,
            messages=modelfile.messages,
            licenses=modelfile.licenses,
            config=kept,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The texts of a model. `config` has the entries of its config blob, which are Ollama's."""

    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    licenses: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def modelfile(self, source: str, adapters: Sequence[str] = (), drafts: Sequence[str] = ()) -> Modelfile:
        """A Modelfile `FROM source`, with the parameters that are known."""
        return Modelfile(
            sources=(source,),
            adapters=tuple(adapters),
            drafts=tuple(drafts),
            template=self.template,
            system=self.system,
            parameters={name: value for name, value in self.parameters.items() if name in OPTION_KINDS},
            messages=self.messages,
            licenses=tuple(self.licenses),
        )


def describe(manifest: Manifest, blobs: Blobs) -> Description:
    """Read the texts of a model. Raises NotFoundError for a missing blob, InvalidArgumentError for a damaged one."""

    def texts(media_type: str) -> list[str]:
        layers = manifest.of_type(media_type)
        return [blobs.read(each.digest, _MAX_TEXT_BYTES).decode(errors="replace") for each in layers]

    parameters, messages = texts(PARAMETERS), texts(MESSAGES)
    config = manifest.config
    return Description(
        template=next(iter(texts(TEMPLATE)), None),
        system=next(iter(texts(SYSTEM)), None),
        parameters=_document(parameters[0], dict) if parameters else {},
        messages=_checked(_document(messages[0], list)) if messages else (),
        licenses=texts(LICENSE),
        config=_document(blobs.read(config.digest, _MAX_TEXT_BYTES), dict) if config is not None else {},
    )


def _document(text: str | bytes, kind: type[Any]) -> Any:
    try:
        document = parse_json(text, "a layer")
    except ValueError:
        document = None
    if not isinstance(document, kind):
        raise InvalidArgumentError(f"a layer of the manifest is not the JSON that its type says: {text[:80]!r}")
    return document


def _checked(messages: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    if any(not isinstance(each, dict) or each.get("role") not in ROLES for each in messages):
        raise InvalidArgumentError("a message of the model is not an object with a role and a content")
    return messages


class Draft:
    """Layers, collected one by one. A context manager: within it the blobs of the layers cannot be removed."""

    def __init__(self, blobs: Blobs, task: StoreTask) -> None:
        self.config: dict[str, Any] = {}
        self._blobs = blobs
        self._task = task
        self._layers: list[Layer] = []
        self._stack = ExitStack()

    def __enter__(self) -> Draft:
        self.claim = self._stack.enter_context(self._blobs.claim())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin_from(self, manifest: Manifest) -> None:
        """Take over all that another model has."""
        self.claim.add(layer.digest for layer in manifest.blobs)
        self._layers = list(manifest.layers)
        self.config = dict(describe(manifest, self._blobs).config)

    def add_path(self, path: Path, more_paths: Sequence[Path] = ()) -> None:
        """A file of this machine, or all visible files of a directory, and further files. Raises NotFoundError,
        StorageFullError, InvalidArgumentError for further files that are not GGUF."""
        files = _files_at(path, _model_files)
        for each in more_paths:
            files |= _files_at(each, _model_files)
        if more_paths and not all(title.lower().endswith(_GGUF) for title in files):
            raise InvalidArgumentError("several FROM lines are for GGUF files: a model, its parts and its projector")
        self.add_files(self._stored(files))

    def add_projector(self, path: Path) -> None:
        """A GGUF file of what sees pictures, beside a model that is there, in place of the model's own.

        Raises InvalidArgumentError for another file.
        """
        for title, digest in self._stored(_files_at(path, _model_files)).items():
            if not self._is_projector(title, digest):
                raise InvalidArgumentError(
                    f"{path} is not the GGUF file of a projector, which FROM beside a model names"
                )
            self._layers = [layer for layer in self._layers if layer.media_type != PROJECTOR]
            self._add(PROJECTOR, digest, "")

    def add_files(self, files: Mapping[str, str]) -> None:
        """Blobs of the store by the names of the files that they are.

        GGUF files are the model, and another single file is called as its backend expects it. Several others are the
        model's directory. Raises NotFoundError for a missing blob, InvalidArgumentError for a name that is no path.
        """
        self.claim.add(check_digest(digest) for digest in files.values())
        is_gguf = all(self._is_gguf(title, digest) for title, digest in files.items())
        projectors = [title for title, digest in files.items() if is_gguf and self._is_projector(title, digest)]
        num_models = len(files) - len(projectors)
        if projectors and (not num_models or len(projectors) > 1):
            raise InvalidArgumentError(f"a projector ({projectors[0]}) goes with one model: name its GGUF file, too")
        has_safetensors = any(title.endswith(".safetensors") for title in files)
        self.config["model_format"] = "gguf" if is_gguf else "safetensors" if has_safetensors else ""
        for title, digest in files.items():
            if title in projectors:
                self._add(PROJECTOR, digest, "")
            elif is_gguf:
                name = "" if num_models == 1 else check_title(title.rpartition("/")[2])
                self._add(MODEL, digest, name)
            elif len(files) == 1:
                self._add(FILE, digest, f"model{Path(check_title(title)).suffix}")
            else:
                self._add(FILE, digest, check_title(title))

    def apply(self, recipe: Recipe) -> None:
        """The quantization, the adapters and the texts of a recipe. Raises as `Quantization.write`."""
        if recipe.quantization is not None:
            self._quantize(recipe.quantization)
        for adapter in (recipe.adapters, *(self._stored(_files_at(path, _all_files)) for path in recipe.adapter_paths)):
            self._add_adapter(adapter)
        draft = recipe.draft_files
        if recipe.draft_path is not None:
            draft = self._stored(_files_at(recipe.draft_path, _model_files))
        if draft:
            self._replace_draft(draft)
        if recipe.template is not None:
            self._replace(TEMPLATE, recipe.template)
        if recipe.system is not None:
            self._replace(SYSTEM, recipe.system)
        if recipe.parameters:
            before = [each for each in self._layers if each.media_type == PARAMETERS]
            known = _document(self._blobs.read(before[0].digest, _MAX_TEXT_BYTES), dict) if before else {}
            self._replace(PARAMETERS, json.dumps({**known, **recipe.parameters}))
        if recipe.messages:
            self._replace(MESSAGES, json.dumps(list(recipe.messages)))
        if recipe.licenses:
            self._replace(LICENSE, *recipe.licenses)

        self.config |= recipe.config

    def _add_adapter(self, files: Mapping[str, str]) -> None:
        self.claim.add(check_digest(digest) for digest in files.values())
        number = len([layer for layer in self._layers if layer.media_type == ADAPTER])
        for title, digest in files.items():
            self._add(ADAPTER, digest, "" if self._is_gguf(title, digest) else f"adapter/{number}/{check_title(title)}")

    def _replace_draft(self, files: Mapping[str, str]) -> None:
        self.claim.add(check_digest(digest) for digest in files.values())
        self._layers = [layer for layer in self._layers if layer.media_type != DRAFT]
        for title, digest in files.items():
            is_alone = len(files) == 1 and self._is_gguf(title, digest)
            self._add(DRAFT, digest, "" if is_alone else f"draft/{check_title(title)}")

    def _quantize(self, quantization: Quantization) -> None:
        weights = [layer for layer in self._layers if layer.media_type in (MODEL, FILE)]
        if not weights:
            raise InvalidArgumentError("there are no weights to quantize")
        status = f"quantizing model to {quantization.name}"

        def report(num_bytes: int, total: int) -> None:
            self._task.report(status, weights[0].digest, total, num_bytes)

        written = self._blobs.temporary()
        self._blobs.make_directories()
        try:
            with tempfile.TemporaryDirectory() as place:
                source, target = Path(place, "source"), Path(place, "target")
                for layer in weights:
                    path = source / (layer.title or "model.gguf")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.symlink_to(self._blobs.path(layer.digest).absolute())
                target.mkdir()
                (target / "model.gguf").symlink_to(written.absolute())
                quantization.write(source, target, report)
            digest = self._blobs.adopt(written, self._task)
        except OSError as error:
            raise self._blobs.full_error(error, "the quantized model") from error
        finally:
            written.unlink(missing_ok=True)
        self.claim.add([digest])
        self._layers = [layer for layer in self._layers if layer not in weights]
        self._layers.insert(0, Layer(MODEL, digest, self._size(digest), ""))
        self.config |= {"model_format": "gguf", "file_type": quantization.name}

    def manifest(self) -> Manifest:
        """The finished manifest; its config blob is written."""
        digests = [layer.digest for layer in self._layers]
        about = {"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": digests}}
        digest = self._write(json.dumps({**self.config, **about}))
        return make_manifest(self._layers, Layer(CONFIG_TYPE, digest, self._size(digest)))

    def _stored(self, paths: Mapping[str, Path]) -> dict[str, str]:
        return {title: self._add_file(path) for title, path in paths.items()}

    def _add_file(self, path: Path) -> str:
        digest = self._blobs.add_file(path, self._task)
        self.claim.add([digest])
        return digest

    def _write(self, text: str) -> str:
        digest = self._blobs.write(None, [text.encode()], self._task)
        self.claim.add([digest])
        return digest

    def _add(self, media_type: str, digest: str, title: str) -> None:
        self._layers.append(Layer(media_type, check_digest(digest), self._size(digest), title))

    def _replace(self, media_type: str, *texts: str) -> None:
        self._layers = [layer for layer in self._layers if layer.media_type != media_type]
        for text in texts:
            self._add(media_type, self._write(text), "")

    def _size(self, digest: str) -> int:
        size_bytes = self._blobs.size(digest)
        if size_bytes is None:
            raise NotFoundError(f"blob {digest} is not in the store: upload it first")
        return size_bytes

    def _is_gguf(self, title: str, digest: str) -> bool:
        self._size(digest)
        if title.lower().endswith(_GGUF):
            return True
        with self._blobs.path(digest).open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC

    def _is_projector(self, title: str, digest: str) -> bool:
        """Whether a GGUF file is what sees pictures beside a language model: its first entry says so, or its name."""
        with self._blobs.path(digest).open("rb") as file:
            head = file.read(_GGUF_HEAD_BYTES)
        return head.startswith(_GGUF_MAGIC) and (_PROJECTOR_ENTRY in head or "mmproj" in title.lower())


def companions(path: Path, title: str) -> dict[str, Path]:
    """A model's file by this title, with the files beside it that hold its weights: OpenVINO's, and ONNX's as torch
    writes them."""
    files = {title: path}
    if path.suffix == ".xml" and (weights := path.with_suffix(".bin")).is_file():
        files[str(Path(title).with_suffix(".bin"))] = weights
    if path.suffix == ".onnx" and (weights := path.with_name(f"{path.name}.data")).is_file():
        files[weights.name] = weights  # the model's file names it
    return files


def _files_at(path: Path, files_of: Callable[[Path], dict[str, Path]]) -> dict[str, Path]:
    """A file, or those of a directory that `files_of` finds, by their titles. Raises NotFoundError."""
    if path.is_dir():
        return files_of(path)
    if not path.is_file():
        raise NotFoundError(f"there is no file and no directory '{path}'")
    files = companions(path, path.name)
    return files if len(files) == 1 else companions(path, f"model{path.suffix}")


def _model_files(directory: Path) -> dict[str, Path]:
    """The files of a model's directory by their titles: its GGUF files alone, unless a config describes more."""
    found = _all_files(directory)
    if not found:
        raise NotFoundError(f"the directory '{directory}' holds no files")
    weights = {title: path for title, path in found.items() if title.lower().endswith(_GGUF)}
    weights = {title: path for title, path in weights.items() if "/" not in title and "mmproj" not in title.lower()}
    if not weights or "config.json" in found or "config.pbtxt" in found:
        return found
    if len(weights) > 1 and not all("-of-" in title for title in weights):
        raise InvalidArgumentError(f"'{directory}' holds several models: name one of {', '.join(weights)}")
    return weights


def _all_files(directory: Path) -> dict[str, Path]:
    """The visible files below a directory, by their path relative to it. Links to files are followed."""
    found = {}
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            found["/".join(parts)] = path
    return found
