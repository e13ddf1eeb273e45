"""Python code that an operator or a model brings: found by name in a directory, imported by its path."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

# Of the names of modules that are imported by their paths.
EXTERNAL_PREFIX = "modelserver_external_"
# Two loads may want the same module at once; it must be executed once.
_lock = threading.RLock()


def find_source(directory: Path, name: str) -> Path | None:
    """The file that defines `name` in `directory`: a package or a single module."""
    for path in (directory / name / "__init__.py", directory / f"{name}.py"):
        if path.is_file():
            return path.resolve()
    return None


def import_source(name: str, source: Path) -> ModuleType:
    """The module at `source`, under a name of its own so that equal names in two directories do not meet.

    It is executed the first time. Raises what its code raises, and then it is as if it had never been imported.
    """
    digest = hashlib.sha256(str(source).encode()).hexdigest()[:12]
    module_name = f"{EXTERNAL_PREFIX}{re.sub(r'[^A-Za-z0-9_]', '_', name)}_{digest}"
    with _lock:
        if module_name in sys.modules:
            return sys.modules[module_name]
        locations = [str(source.parent)] if source.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(module_name, source, submodule_search_locations=locations)
        assert spec is not None, f"{source} has no loader"
        assert spec.loader is not None, f"{source} has no loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            for loaded in [other for other in sys.modules if other.split(".")[0] == module_name]:
                del sys.modules[loaded]
            raise
        return module
