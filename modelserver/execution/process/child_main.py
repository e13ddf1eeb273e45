"""Where a child process starts. It is run by its path, so that the child needs no PYTHONPATH, which would come
before the standard library and stay in the environment of programs that the model starts."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent.parent
_PACKAGES = "MODELSERVER_CHILD_PACKAGES"


def _find_server() -> None:
    """Make `import modelserver` find the server that started this process, even if it is not installed.

    In an environment that a model brings, the server's packages are imported by their paths, and its libraries come
    last, after those of the environment.
    """
    foreign = os.environ.pop(_PACKAGES, "")
    if foreign:
        told = json.loads(foreign)
        sys.path += told["libraries"]
        for name, path in told["packages"].items():
            _import_package(name, path)
        return
    spec = importlib.util.find_spec("modelserver")
    if spec is None or spec.origin is None or Path(spec.origin).parent != _PACKAGE:
        sys.path.insert(0, str(_PACKAGE.parent))


def _import_package(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(Path(path).parent)])
    assert spec is not None, f"{path} has no loader"
    assert spec.loader is not None, f"{path} has no loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _find_server()
    from modelserver.execution.process.child import main

    sys.exit(main())
