"""A program that was written for another server: its imports get modules of ours, and its server is ours.

`modelserver serve app.py` runs such a program unmodified. `stand_in` does the same for a program or a test that is
started in another way. The packages themselves need not be installed.
"""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelserver.api import NotFoundError, PayloadTooLargeError, UnauthenticatedError, UnavailableError
from modelserver.backend import InternalError, InvalidArgumentError, ServerError
from modelserver.embed.server import Server
from modelserver.options.sources import resolve_options

if TYPE_CHECKING:
    from modelserver.options.server_options import ServerOptions

# The packages, each with the modules that programs import. All names are in the module of ours.
MODULES = {
    "litserve": ("litserve", "litserve.api", "litserve.server", "litserve.specs"),
    "pytriton": (
        "pytriton",
        "pytriton.triton",
        "pytriton.decorators",
        "pytriton.model_config",
        "pytriton.model_config.common",
        "pytriton.model_config.tensor",
        "pytriton.proxy",
        "pytriton.proxy.types",
        "pytriton.exceptions",
    ),
    "kserve": (
        "kserve",
        "kserve.model",
        "kserve.model_server",
        "kserve.errors",
        "kserve.logging",
        "kserve.protocol",
        "kserve.protocol.infer_type",
        "kserve.storage",
        "kserve.utils",
        "kserve.utils.utils",
        "kserve_storage",
    ),
    "mlserver": (
        "mlserver",
        "mlserver.codecs",
        "mlserver.errors",
        "mlserver.logging",
        "mlserver.model",
        "mlserver.settings",
        "mlserver.types",
        "mlserver.utils",
    ),
    "tritonserver": ("tritonserver",),
}


@dataclass(slots=True)
class _Command:
    """What the command line asks of the program that runs: flags, which win over the program's, or only a look."""

    words: Sequence[str] = ()
    options: ServerOptions | None = None
    has_served: bool = field(default=False)


_command: _Command | None = None
# What an exception with the `status_code` of a web framework becomes.
_ERRORS: dict[int, type[ServerError]] = {
    401: UnauthenticatedError,
    404: NotFoundError,
    413: PayloadTooLargeError,
    429: UnavailableError,
    503: UnavailableError,
}


def stand_in(*packages: str) -> None:
    """Let imports of these packages find modules of ours, also where the package is installed.

    Raises InvalidArgumentError for a package that nothing stands in for.
    """
    for package in packages:
        if package not in MODULES:
            raise InvalidArgumentError(f"nothing stands in for '{package}', only for {', '.join(MODULES)}")
        module = importlib.import_module(f"modelserver.embed.foreign.{package}")
        for name in MODULES[package]:
            alias = types.ModuleType(name, module.__doc__)
            vars(alias).update({key: value for key, value in vars(module).items() if not key.startswith("_")})
            alias.__path__ = []
            alias.__getattr__ = _refusal(name)  # type: ignore[method-assign]
            sys.modules[name] = alias
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], last, alias)


def _refusal(module: str) -> types.FunctionType:
    def missing(name: str) -> object:
        raise AttributeError(f"modelserver, which stands in for {module}, has no '{name}'")

    return missing  # type: ignore[return-value]


def packages_of(file: Path) -> list[str]:
    """The packages that a Python file imports and that modules of ours stand in for; none for a Python model."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, ValueError, SyntaxError):
        return []
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel":
            return []
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        found |= dict.fromkeys(name.partition(".")[0] for name in names)
    return [name for name in found if name in MODULES]


def run_file(file: Path, packages: Sequence[str], words: Sequence[str]) -> None:
    """Run a program until it is stopped; `words` are flags of `modelserver serve`, which win over the program's own.

    Behind a word `--` they are the program's own arguments.
    Raises InvalidArgumentError if it ends without having served, and SystemExit where it fails, with its traceback.
    """
    global _command  # the program calls without a place for it
    stand_in(*packages)
    end = words.index("--") if "--" in words else len(words)
    command = _command = _Command(words[:end])
    before = sys.argv
    sys.argv = [str(file), *words[end + 1 :]]
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    except ServerError:
        raise
    except Exception:  # the program's own, which its author reads
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.argv, _command = before, None
    if not command.has_served:
        hint = "; serve the directory of its model-settings.json" if "mlserver" in packages else ""
        names = ", ".join(packages)
        raise InvalidArgumentError(f"{file} ended without serving: it never started a server of {names}{hint}")


def serve(server: Server) -> None:
    """Serve until SIGINT or SIGTERM, with the flags of the command line if it started the program."""
    if _command is None:
        server.run()
        return
    _command.has_served = True
    server.run(resolve_options(list(_command.words), os.environ, server.options).options)


def note_served() -> None:
    """The program of the command line has a server that it asks by itself."""
    if _command is not None:
        _command.has_served = True


def translated(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call; an exception with `status_code` and `detail`, as web frameworks have them, is the client's answer."""
    try:
        return call(*arguments)
    except Exception as error:
        answer = translation(error)
        if answer is error:
            raise
        raise answer from error


def translation(error: Exception) -> Exception:
    """The client's answer that an exception of a web framework stands for; any other exception as it is."""
    status = getattr(error, "status_code", None)
    if isinstance(error, ServerError) or not isinstance(status, int):
        return error
    kind = _ERRORS.get(status, InvalidArgumentError if 400 <= status < 500 else InternalError)
    return kind(str(getattr(error, "detail", error)))
