"""Where a child process starts. It is run by its path, so that the child needs no PYTHONPATH, which would come
before the standard library and stay in the environment of what the model starts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def _find_server() -> None:
    """Make `import modelserver` find the server that started us, also when that was not installed."""
    spec = importlib.util.find_spec("modelserver")
    if spec is None or spec.origin is None or Path(spec.origin).parent != _PACKAGE:
        sys.path.insert(0, str(_PACKAGE.parent))


if __name__ == "__main__":
    _find_server()
    from modelserver.execution.child import main

    sys.exit(main())
