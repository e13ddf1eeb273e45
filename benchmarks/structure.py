"""The shape of the source tree: `python -m benchmarks.structure [--list ROW] [--root DIRECTORY]`.

Counted are the Python files of modelserver/ and backends/, without the generated ones of modelserver/pb/.

- A room is a package directly below modelserver/ or backends/, and modelserver/execution/process/, which the layers
  hold apart. A package is a directory with an `__init__.py`.
- An arrow leads from one room (or package) to another when any file of the first imports from the second, for
  annotations too. It runs back when it leads up the layers that tests/test_layers.py declares.
- An import circle is a set of files that import each other in a ring, at the top of the file or in a function, or for
  annotations.
- A lonely Protocol is named in no file but the one that defines it, tests left out.
- Production lines are all lines of a file, with its comments, docstrings and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL_LINES = 60
# Rooms that lie inside another directory.
INNER_ROOMS = ("modelserver.execution.process",)


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        inner = next((room for room in INNER_ROOMS if self.package.startswith(room)), None)
        return inner or ".".join(self.package.split(".")[:2])

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


class SourceTree:
    """All modules below a root, and who imports whom."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {module.name: module for module in _read_modules(root)}
        self.imports = {name: self._imports_of(module) for name, module in self.modules.items()}

    def arrows(self, of: str) -> set[tuple[str, str]]:
        """Pairs of rooms or packages (`of` is the attribute of a module), the first of which imports the second."""
        ends = {name: getattr(module, of) for name, module in self.modules.items()}
        return {(ends[a], ends[b]) for a, targets in self.imports.items() for b in targets if ends[a] != ends[b]}

    def arrows_back(self) -> list[str]:
        layer = _Layers(self.root)
        return sorted(
            f"{importer} -> {target}"
            for importer, targets in self.imports.items()
            for target in targets
            if (low := layer.number(importer)) is not None and low < (layer.number(target) or 0)
        )

    def circles(self) -> list[str]:
        """The rings of files, each as one line."""
        return sorted(" ".join(sorted(ring)) for ring in _rings(self.imports) if len(ring) > 1)

    def lonely_protocols(self) -> list[str]:
        defined = [(name, each.name) for name, each in self._classes() if "Protocol" in map(_last_name, each.bases)]
        words = {name: set(re.findall(r"\w+", module.text)) for name, module in self.modules.items()}
        return sorted(
            f"{home}.{protocol}"
            for home, protocol in defined
            if not any(protocol in found for name, found in words.items() if name != home)
        )

    def _classes(self) -> Iterator[tuple[str, ast.ClassDef]]:
        for name, module in self.modules.items():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    yield name, node

    def _imports_of(self, module: Module) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(module, node)
                members = {f"{base}.{alias.name}" for alias in node.names}
                found |= members & self.modules.keys()
                if members - self.modules.keys():
                    found.add(base)
        return (found & self.modules.keys()) - {module.name}


class _Layers:
    """The layers that the test of imports declares."""

    def __init__(self, root: Path) -> None:
        tree = ast.parse((root / "tests" / "test_layers.py").read_text())
        declared = next(
            node for node in tree.body if isinstance(node, ast.AnnAssign) and _last_name(node.target) == "LAYERS"
        )
        assert declared.value is not None
        layers = ast.literal_eval(declared.value)
        self._number = {prefix: number for number, prefixes in enumerate(layers) for prefix in prefixes}

    def number(self, name: str) -> int | None:
        prefixes = (name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1))
        return next((self._number[prefix] for prefix in prefixes if prefix in self._number), None)


def _read_modules(root: Path) -> Iterator[Module]:
    for package, directory in (("modelserver", root / "modelserver"), ("modelserver_backends", root / "backends")):
        for path in sorted(directory.rglob("*.py")):
            parts = [package, *path.relative_to(directory).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not name.startswith("modelserver.pb"):
                text = path.read_text()
                yield Module(name, path.relative_to(root), text, ast.parse(text))


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.package.split(".")
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).split("[")[0].rpartition(".")[2]


def _rings(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """The strongly connected components of a graph, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[set[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                yield from visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            position = stack.index(name)
            yield set(stack[position:])
            del stack[position:]

    for name in edges:
        if name not in index:
            yield from visit(name)


def rows(tree: SourceTree) -> dict[str, Iterable[str]]:
    """What the table counts, row by row, but for the lines."""
    modules = tree.modules.values()
    small = [f"{module.num_lines:3} {module.path}" for module in modules if module.num_lines <= SMALL_LINES]
    return {
        "loose modules": [str(module.path) for module in modules if len(module.path.parts) == 2],
        "rooms": sorted({module.room for module in modules}),
        "arrows between rooms": sorted(f"{a} -> {b}" for a, b in tree.arrows("room")),
        "packages": sorted({module.package for module in modules}),
        "arrows between packages": sorted(f"{a} -> {b}" for a, b in tree.arrows("package")),
        "arrows back": tree.arrows_back(),
        "import circles": tree.circles(),
        "lonely Protocols": tree.lonely_protocols(),
        "files": [str(module.path) for module in modules],
        f"files of at most {SMALL_LINES} lines": small,
        "of them no __init__.py": [line for line in small if not line.endswith("__init__.py")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    parser.add_argument("--list", metavar="ROW", help="print what a row of the table counts")
    arguments = parser.parse_args()
    tree = SourceTree(arguments.root)
    counted = rows(tree)
    if arguments.list is not None:
        if arguments.list not in counted:
            parser.error(f"--list takes one of: {', '.join(counted)}")
        sys.stdout.writelines(f"{line}\n" for line in counted[arguments.list])
        return
    for name, found in counted.items():
        print(f"{name:32} {len(list(found)):>7,}")
    print(f"{'production lines':32} {sum(module.num_lines for module in tree.modules.values()):>7,}")


if __name__ == "__main__":
    main()
