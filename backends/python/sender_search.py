"""Whether a model uses response senders: its server must know before the first request, and they cost each a little."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from . import triton_python_backend_utils as pb_utils

_NAME = b"get_response_sender"
# What a module that deals with requests has among its names: pb_utils itself, or a class or function of it.
_OURS = frozenset(map(id, (pb_utils, *filter(callable, (getattr(pb_utils, name) for name in pb_utils.__all__)))))


def uses_senders(source: Path, model_directory: Path, known: Collection[str]) -> bool:
    """Whether the model's files mention response senders, or what it has imported from elsewhere does.

    Its files: all beside `source`, imported or not, and those in its directory. `known`: names of modules that were
    imported before the model was; of others those are read that know pb_utils, as a company's base class of its models.
    """
    files = {*source.parent.rglob("*.py"), *model_directory.glob("*.py")}
    for name, module in list(sys.modules.items()):
        if name not in known and module is not pb_utils and _knows_pb_utils(vars(module)):
            files.add(Path(getattr(module, "__file__", None) or ""))
    return any(map(_mentions_senders, files))


def _knows_pb_utils(names: dict[str, object]) -> bool:
    return any(id(value) in _OURS for value in names.values())


def _mentions_senders(path: Path) -> bool:
    """Whether the file does; one that is no readable source may."""
    try:
        return path.suffix != ".py" or _NAME in path.read_bytes()
    except OSError:
        return True
