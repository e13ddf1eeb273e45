"""Whose word there is for a file that can run code when it is loaded: the operator's, by settings or the repository.

Files and configs that a client sends with a load request are not trusted.
"""

from __future__ import annotations

from pathlib import Path

import torch

from modelserver.backend import BackendContext, InvalidArgumentError, UnsupportedError

from .archive import DAMAGE, FileKind, first_lines, refuse_code
from .options import ALLOW_NATIVE, ALLOW_PICKLE, is_allowed

# Triton's name of what runs AOTInductor packages: a config that has it means native code.
NATIVE_PLATFORM = "torch_aoti"


def count_weights(path: Path) -> int:
    """How many tensors a checkpoint by names holds; 0 if it holds anything else. Runs nothing of the file."""
    try:
        found = torch.load(path, map_location="meta", weights_only=True)
    except DAMAGE:
        return 0
    if isinstance(found, dict) and len(found) == 1 and isinstance(inner := next(iter(found.values())), dict):
        found = inner  # {"state_dict": ...}
    is_weights = isinstance(found, dict) and all(isinstance(each, torch.Tensor) for each in found.values())
    return len(found) if is_weights else 0


def check_trust(context: BackendContext, kind: FileKind, path: Path) -> None:
    """Raise UnsupportedError if loading the file would run code that the operator has not vouched for."""
    model = f"model '{context.model_name}' version {context.version}"
    match kind:
        case FileKind.PACKAGE:
            _check_package(context, path, model)
        case FileKind.TORCHSCRIPT:
            _check_script(context, path, model)
        case FileKind.PICKLE | FileKind.EXPORTED:
            _check_pickles(context, kind, path, model)


def _check_package(context: BackendContext, path: Path, model: str) -> None:
    if is_allowed(context, ALLOW_NATIVE):
        return
    what = f"{model}: {path} is an AOTInductor package, a library that can do anything"
    vouch = f"vouch for all models of this server with --backend-config=pytorch,{ALLOW_NATIVE}=true"
    if context.is_uploaded:
        raise UnsupportedError(
            f"{what}, and came with the request to load it; put it into the model repository, or {vouch}"
        )
    if context.config.platform != NATIVE_PLATFORM:
        raise UnsupportedError(
            f'{what}; say in its config that it is meant to be one (platform: "{NATIVE_PLATFORM}"), or {vouch}'
        )


def _check_script(context: BackendContext, path: Path, model: str) -> None:
    if context.is_uploaded and not is_allowed(context, ALLOW_NATIVE):
        raise UnsupportedError(
            f"{model}: {path} is a TorchScript archive, a program that can read and write the server's files, and came "
            "with the request to load it; bring what torch.export.save writes, put it into the model repository, or "
            f"vouch for all models of this server with --backend-config=pytorch,{ALLOW_NATIVE}=true"
        )


def _check_pickles(context: BackendContext, kind: FileKind, path: Path, model: str) -> None:
    if is_allowed(context, ALLOW_PICKLE):
        return
    advice = (
        "save the model with torch.export.save, or vouch for all models of this server with "
        f"--backend-config=pytorch,{ALLOW_PICKLE}=true"
    )
    if kind is FileKind.PICKLE and (count := count_weights(path)):
        raise UnsupportedError(
            f"{model}: {path} holds {count} weights and no program (a state_dict): write the module with 'modelserver "
            f"convert FILE.py:CLASS DIRECTORY --to pt2 --weights {path.name}', where CLASS is the module's class or a "
            "function that makes it"
        )
    if kind is FileKind.PICKLE:
        danger = f"{path} is a {kind.value} (torch.save), which can run any code when loaded"
        raise UnsupportedError(f"{model}: {danger}; {advice}")
    try:
        refuse_code(path)
    except UnsupportedError as error:
        raise UnsupportedError(f"{model}: {error}; {advice}") from error
    except DAMAGE as error:
        raise InvalidArgumentError(f"{model}: PyTorch cannot load {path}: {first_lines(error)}") from error
