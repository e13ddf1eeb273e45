"""An optional C module: used if it was built, is wanted, and was built from the sources beside it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

# An environment variable, because child processes inherit it, and because modules decide this
# when they are imported: once, so that no request asks.
VARIABLE = "MODELSERVER_PURE_PYTHON"
_OFF = frozenset({"", "0", "false", "no", "off"})

logger = logging.getLogger(__name__)


def is_wanted(environment: Mapping[str, str]) -> bool:
    return environment.get(VARIABLE, "").lower() in _OFF


def load_extension(name: str, environment: Mapping[str, str]) -> ModuleType | None:
    """The C module of that name; None if it was not built, is not wanted, or was built from other sources.

    A stale binary remains when a checkout is updated without installing again; using it would fail requests.
    """
    if not is_wanted(environment):
        return None
    try:
        module = import_module(name)
    except ImportError:
        return None
    if _is_stale(module):
        logger.warning(
            "%s was built from other sources than those beside it and is ignored: Python does its work, more slowly; "
            "install again (pip install --editable .)",
            module.__file__,
        )
        return None
    return module


def _is_stale(module: ModuleType) -> bool:
    """Whether its sources are here and it was built from others. A build without setup.py may not record them."""
    built_of = getattr(module, "SOURCE_DIGEST", None)
    here = source_digest(Path(module.__file__ or "").parent)
    return built_of is not None and here is not None and built_of != here


def source_digest(directory: Path) -> str | None:
    """The hash that setup.py gives to the compiler; None without sources, as in an installed wheel."""
    sources = sorted(directory.glob("*.[ch]"))
    if not sources:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
