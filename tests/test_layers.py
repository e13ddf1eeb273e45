"""Imports go down the layers of docs/architecture.md, never up and never in a circle; packages are all named."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The deepest first. A module belongs to the layer of its longest prefix here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("modelserver.errors", "modelserver.core", "modelserver.pb"),
    (
        "modelserver.auth",
        "modelserver.cache",
        "modelserver.config",
        "modelserver.endpoints",
        "modelserver.options",
        "modelserver.platform",
        "modelserver.store",
        "modelserver.telemetry",
    ),
    ("modelserver.backend", "modelserver.repoagent", "modelserver.scheduling"),
    ("modelserver.execution", "modelserver.backend.process", "modelserver.backend.child"),
    ("modelserver.repository",),
    ("modelserver.planes",),
    ("modelserver.protocol",),
    ("modelserver.api", "modelserver.frontends"),
    ("modelserver.client", "modelserver.wire"),
    (
        "modelserver.app",
        "modelserver.batch",
        "modelserver.bench",
        "modelserver.cli",
        "modelserver.cluster",
        "modelserver.embed",
        "modelserver.remote",
        "modelserver.router",
        "modelserver.toolkit",
        # Processes of their own, with logs that the app sets up.
        "modelserver.wire.processes",
        "modelserver.__main__",
    ),
)
LAYER_OF = {prefix: number for number, prefixes in enumerate(LAYERS) for prefix in prefixes}

# What a bundled backend may import besides its own package and its libraries: the contract.
CONTRACT = {"modelserver.backend", "modelserver.backend.process", "modelserver.backend.child"}


def modules() -> dict[str, Path]:
    found = {}
    for package, directory in (("modelserver", ROOT / "modelserver"), ("modelserver_backends", ROOT / "backends")):
        for path in directory.rglob("*.py"):
            parts = [package, *path.relative_to(directory).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


MODULES = modules()


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imports_of(name: str, *, only_top_level: bool = False) -> set[str]:
    """The modules of ours that module `name` imports when it runs; those for annotations alone do not count."""
    tree = _tree(name)
    found: set[str] = set()
    for node in _statements(tree, only_top_level=only_top_level):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(name, node)
            for alias in node.names:
                full = f"{module}.{alias.name}"
                found.add(full if full in MODULES else module)
    return {module for module in found if module.split(".")[0] in ("modelserver", "modelserver_backends")} - {name}


def _absolute(name: str, node: ast.ImportFrom) -> str:
    """What is imported from; backends are relocatable and import their own modules relatively."""
    if node.level == 0:
        return node.module or ""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _statements(tree: ast.AST, *, only_top_level: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if only_top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        yield from _statements(node, only_top_level=only_top_level)


def layer(name: str) -> int | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((LAYER_OF[prefix] for prefix in prefixes if prefix in LAYER_OF), None)


CORE = sorted(name for name in MODULES if name.startswith("modelserver.") and MODULES[name].name != "__init__.py")
BACKENDS = sorted(name for name in MODULES if name.startswith("modelserver_backends."))


@pytest.mark.parametrize("name", CORE)
def test_imports_go_down(name: str) -> None:
    own = layer(name)
    assert own is not None, f"{name} is in no layer: add it to LAYERS"
    upward = {target for target in imports_of(name) if (layer(target) or 0) > own or "backends." in target}
    assert not upward, f"{name} (layer {own}) imports from above: {sorted(upward)}"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_imports_the_contract_and_itself(name: str) -> None:
    package = ".".join(name.split(".")[:2])
    foreign = {
        target
        for target in imports_of(name)
        if target not in CONTRACT and not (target == package or target.startswith(package + "."))
    }
    assert not foreign, f"{name} imports more than the contract, modelserver.backend: {sorted(foreign)}"


@pytest.mark.parametrize("name", [name for name in CORE if name.startswith("modelserver.frontends.llm.")])
def test_the_generation_core_knows_no_api(name: str) -> None:
    apis = {target for target in imports_of(name) if target.startswith("modelserver.frontends.")} - {
        target for target in MODULES if target.startswith(("modelserver.frontends.llm.", "modelserver.frontends.http."))
    }
    assert not apis, f"{name} imports from an API's package: {sorted(apis)}"


def test_there_is_no_import_cycle() -> None:
    edges = {name: imports_of(name, only_top_level=True) & MODULES.keys() for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "import cycle: " + " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for target in edges[name]:
            visit(target, (*path, name))
        done.add(name)

    for name in MODULES:
        visit(name, ())


def test_every_package_is_named_in_pyproject() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        named = tomllib.load(file)["tool"]["setuptools"]["packages"]
    packages = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")
    assert sorted(named) == packages
    without_init = {path.parent for path in MODULES.values()} - {
        path.parent for path in MODULES.values() if path.name == "__init__.py"
    }
    assert not without_init


def test_wires_know_frontends_only_where_a_front_process_is_put_together() -> None:
    wires = [name for name in MODULES if name.startswith("modelserver.wire.")]
    knowing = {name for name in wires if any(each.startswith("modelserver.frontends") for each in imports_of(name))}
    assert knowing == {"modelserver.wire.processes.front_frontends"}
