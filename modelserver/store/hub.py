"""The hub of Hugging Face, by its own library: which files of a repository make a model, and where they lie.

The library lists the files, and finds endpoint and token (`HF_ENDPOINT`, `HF_TOKEN`, `hf auth login`). The files are
fetched as those of registries are: into the store, with its locks, checks and resumption. Pickles are never fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.errors import (
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.store.download import RemoteBlob
from modelserver.store.manifest import check_digest, check_title
from modelserver.store.names import DEFAULT_TAG, ModelName

_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|BF16|F16|FP16|F32|MXFP4\w*|TQ\d\w*))$", re.IGNORECASE)
# Of a repository with GGUF files, in the order in which they are taken when the name has no tag.
_PREFERRED = ("q4_k_m", "q4_k_s", "q4_0", "q5_k_m", "q8_0")
_SAFETENSORS = "safetensors"  # the tag for these where there are GGUF files, too
_TEXTS = (".json", ".txt", ".model", ".jinja", ".safetensors")
_SUBDIRECTORY = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence transformers
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `sha256` is empty for small ones, of which `blob_id` is git's id."""

    path: str
    size_bytes: int
    sha256: str = ""
    blob_id: str = ""


@dataclass(frozen=True, slots=True)
class HubModel:
    """The chosen files of a model, and where they are. GGUF files are the model; others are files of its directory."""

    files: tuple[tuple[HubFile, RemoteBlob], ...]
    is_gguf: bool


def find_on_hub(name: ModelName) -> HubModel:
    """The files to fetch for a name. Raises NotFoundError for an unknown repository or quantization,
    PermissionDeniedError for one that needs a token, UnavailableError without the hub or its library."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise UnavailableError(
            f"'{name}' needs the Python package 'huggingface_hub', which is not installed: "
            "pip install 'modelserver-py[hub]'"
        ) from None
    endpoint = os.environ.get("HF_ENDPOINT") or None
    repository = f"{name.namespace}/{name.model}"
    try:
        info = huggingface_hub.HfApi(endpoint=endpoint).model_info(repository, files_metadata=True)
    except errors.GatedRepoError:
        raise PermissionDeniedError(
            f"'{repository}' is gated: accept its terms on the hub, and give a token by HF_TOKEN or 'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise NotFoundError(
            f"the hub has no model '{repository}', or it is private: HF_TOKEN or 'hf auth login' gives a token"
        ) from None
    except Exception as error:  # the library's own, and those of the HTTP client that it happens to use
        raise UnavailableError(f"the hub cannot be asked about '{repository}': {error}") from None
    files = [
        HubFile(
            check_title(each.rfilename),
            each.size or 0,
            each.lfs.sha256 if each.lfs is not None else "",
            each.blob_id or "",
        )
        for each in info.siblings or ()
    ]
    token = huggingface_hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    chosen, is_gguf = choose(files, name)
    remotes = []
    for file in chosen:
        url = huggingface_hub.hf_hub_url(repository, file.path, revision=info.sha, endpoint=endpoint)
        digest = check_digest(f"sha256:{file.sha256}") if file.sha256 else None
        state = f"{info.sha} {file.blob_id}"
        remotes.append((file, RemoteBlob(url, file.path, digest, file.size_bytes, headers, state)))
    return HubModel(tuple(remotes), is_gguf)


def choose(files: Sequence[HubFile], name: ModelName) -> tuple[list[HubFile], bool]:
    """The files that make the model, and whether they are GGUF.

    Raises NotFoundError for a quantization that is not there, UnsupportedError without a file that can be served.
    """
    groups: dict[str, list[HubFile]] = {}
    for file in files:
        if file.path.lower().endswith(".gguf") and "mmproj" not in file.path.lower():
            groups.setdefault(_SPLIT.sub("", file.path[: -len(".gguf")]), []).append(file)
    if not groups or name.tag == _SAFETENSORS:
        return _choose_safetensors(files, name), False
    if name.tag != DEFAULT_TAG:
        found = next((stem for stem in sorted(groups) if _is_of_tag(stem, name.tag.lower())), None)
        if found is None:
            known = sorted({_label(stem) for stem in groups})
            raise NotFoundError(f"'{name}': the repository has no '{name.tag}'; there are: {', '.join(known)}")
        return groups[found], True
    for tag in _PREFERRED:
        for stem in sorted(groups):
            if _is_of_tag(stem, tag):
                return groups[stem], True
    return groups[min(groups)], True


def _is_of_tag(stem: str, tag: str) -> bool:
    """Whether the name of a file, or that of its directory, ends with the tag in lower case."""
    parts = stem.lower().split("/")
    return any(part == tag or part.endswith((f"-{tag}", f".{tag}", f"_{tag}")) for part in parts) or (
        f"{parts[-1]}.gguf" == tag
    )


def _label(stem: str) -> str:
    match = _QUANTIZATION.search(stem.rpartition("/")[2])
    return match[1] if match else stem


def _choose_safetensors(files: Sequence[HubFile], name: ModelName) -> list[HubFile]:
    top = [file for file in files if "/" not in file.path and file.path.lower().endswith(_TEXTS)]
    weights = [file for file in top if file.path.endswith(".safetensors")]
    if not weights or all(file.path != "config.json" for file in top):
        pickles = next((file.path for file in files if file.path.endswith(_PICKLES)), "")
        reason = f"; {pickles} is a pickle, which may run code and is not fetched" if pickles else ""
        raise UnsupportedError(
            f"'{name}': the repository has neither GGUF files nor a config.json with *.safetensors{reason}"
        )
    if any(not file.path.startswith("consolidated") for file in weights):  # the same weights by other names
        top = [file for file in top if not file.path.startswith("consolidated")]
    return top + [file for file in files if _SUBDIRECTORY.fullmatch(file.path)]
