"""`modelserver pull | push | create | cp | rm | ls | stop`: the models of a store, with or without a running server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.cli.output import AsJson, Url, print_json, print_line, print_table
from modelserver.cli.usage import bytes_text, duration_text
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.config.modelfile import FILENAME as MODELFILE
from modelserver.config.modelfile import parse_modelfile, read_modelfile
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.store.draft import Recipe
from modelserver.store.names import parse_name
from modelserver.store.store import OLLAMA_VARIABLE, STORE_VARIABLE, Store
from modelserver.store.task import Progress, StoreTask

Directory = Annotated[
    Path | None,
    typer.Option("--store", help=f"The store's directory; else that of {STORE_VARIABLE} or {OLLAMA_VARIABLE}."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Also talk to other machines without TLS.")]
Name = Annotated[str, typer.Argument(help="Name of the model: [host/][namespace/]model[:tag].")]


def pull(
    source: Annotated[
        str, typer.Argument(help="qwen3:0.6b, hf.co/org/model[:quant], host/namespace/model, or a path, https:, s3:.")
    ],
    name: Annotated[str, typer.Argument(help="What to call it, if not after its source.")] = "",
    insecure: Insecure = False,
    trust: Annotated[bool, typer.Option("--trust", help="Also fetch files that may run code when loaded.")] = False,
    store: Directory = None,
) -> None:
    """Bring a model into the store. An interrupted pull continues where it stopped."""
    with shown_task() as task:
        pulled = Store(store).pull(source, name=name, task=task, is_insecure=insecure, is_trusted=trust)
    print_line(str(pulled))


def push(name: Name, insecure: Insecure = False, store: Directory = None) -> None:
    """Upload a model of the store to the registry in its name."""
    with shown_task() as task:
        Store(store).push(name, task=task, is_insecure=insecure)
    print_line(f"pushed {parse_name(name)}")


def create(
    name: Name,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="A Modelfile; - reads standard input.")] = None,
    source: Annotated[str, typer.Option("--from", help="A file, a directory, or a model of the store.")] = "",
    template: Annotated[str | None, typer.Option(help="Its template.")] = None,
    system: Annotated[str | None, typer.Option(help="Its system message.")] = None,
    quantize: Annotated[str, typer.Option("-q", "--quantize", help="Write few bits: q8_0, q6_K, q4_K_M, q4_0.")] = "",
    store: Directory = None,
    repository: Annotated[
        Path | None,
        typer.Option(
            "--model-repository", help="Write the model's directory here, with a config, in place of the store."
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME:DATATYPE:DIMS", help="An argument of a TorchScript file, without the batch."
        ),
    ] = None,
    allow_pickle_models: Annotated[
        bool, typer.Option("--allow-pickle-models", help="Read a pickled model for its config: it may run any code.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a model's directory.")] = False,
) -> None:
    """Make a model in the store by a Modelfile, or from files or another model.

    With --model-repository a file or a directory of any kind becomes a directory of that repository.
    """
    if file is not None and source:
        raise InvalidArgumentError("give one of -f and --from")
    if repository is not None:
        _create_directory(repository / name, source, inputs or [], allow_pickle=allow_pickle_models, force=force)
        return
    if Path(source).is_file():
        from modelserver.backend.model_files import backend_for_model_file  # takes a while

        backend_for_model_file(Path(source))  # raises for a kind that is not served
    recipe = _recipe_of(source) if source else _read_recipe(file or Path(MODELFILE))
    if template is not None:
        recipe = replace(recipe, template=template)
    if system is not None:
        recipe = replace(recipe, system=system)
    if quantize:
        from modelserver.frontends.ollama.store import quantization_of

        recipe = replace(recipe, quantization=quantization_of(quantize))
    with shown_task() as task:
        made = Store(store).create(name, recipe, task)
    print_line(f"created {made}")


def _create_directory(target: Path, source: str, inputs: list[str], *, allow_pickle: bool, force: bool) -> None:
    from modelserver.cli.convert import module_options
    from modelserver.toolkit.model_directory import create_model  # takes a while

    if not source:
        raise InvalidArgumentError("--model-repository needs --from: the file or directory of a model")
    options = module_options(inputs, None, 64 if inputs else 0)
    config = create_model(Path(source), target, options, allow_pickle=allow_pickle, force=force)
    print_line(f"created {target} of backend {config.backend}: modelserver serve {target.parent}")


def cp(
    source: Annotated[str, typer.Argument(help="Name of a model of the store.")],
    target: Annotated[str, typer.Argument(help="Its further name.")],
    store: Directory = None,
) -> None:
    """Give a model of the store a second name."""
    print_line(f"copied {parse_name(source)} to {Store(store).copy(source, target)}")


def rm(
    names: Annotated[list[str], typer.Argument(help="Names of models of the store.")], store: Directory = None
) -> None:
    """Remove models from the store. Files that another model needs stay."""
    opened = Store(store)
    for name in names:
        print_line(f"removed {opened.remove(name)}")
    opened.collect()


def ls(store: Directory = None, as_json: AsJson = False) -> None:
    """List the models of the store."""
    found = Store(store).models()
    if as_json:
        rows = [
            {"name": str(each.name), "digest": each.manifest.digest, "bytes": each.manifest.size_bytes,
             "modified_s": each.modified_s}
            for each in found
        ]  # fmt: skip
        print_json(rows)
        return
    now_s = time.time()
    lines = [
        (
            str(each.name),
            short_id(each.manifest.digest),
            bytes_text(each.manifest.size_bytes),
            f"{duration_text(max(0.0, now_s - each.modified_s))} ago",
        )
        for each in found
    ]
    print_table(("name", "id", "size", "modified"), lines)


def stop(
    model: Annotated[str, typer.Argument(help="Name of a model that is loaded on demand.")], url: Url = DEFAULT_URL
) -> None:
    """Unload a model of a running server; its next request loads it again."""
    ServerClient(url).unload(repository_name(model), {"evict": True})
    print_line(f"stopping {model}")


def show_stored(name: str, *, as_json: bool) -> bool:
    """Show a model of the store; False if it has none of that name."""
    from modelserver.cli.stored_models import read_model
    from modelserver.repository.options import DefinitionOptions
    from modelserver.repository.store_root import StoreRoot

    store = Store()
    try:
        stored = store.find(name)
    except (NotFoundError, InvalidArgumentError):
        return False
    described = store.describe(name)
    root = StoreRoot(store)
    root.sync()
    served = read_model([str(root.path)], stored.name.repository_name, DefinitionOptions())
    document: dict[str, Any] = {
        "name": str(stored.name),
        "digest": stored.manifest.digest,
        "bytes": stored.manifest.size_bytes,
        "backend": served.definition.config.backend if served.definition is not None else "",
        "problems": [problem.message for problem in served.problems],
        "parameters": dict(described.parameters),
        "template": described.template or "",
        "system": described.system or "",
        "licenses": list(described.licenses),
    }
    if as_json:
        print_json(document)
        return True
    print_line(f"{document['name']}: {short_id(document['digest'])}, {bytes_text(document['bytes'])}")
    print_line(f"backend {document['backend']}" if served.is_valid else "cannot be served")
    for problem in document["problems"]:
        print_line(f"  {problem}")
    print_line("")
    print_line(described.modelfile(str(stored.name)).text().rstrip())
    return True


def _recipe_of(source: str) -> Recipe:
    path = Path(source).expanduser()
    return Recipe(path=path) if path.exists() else Recipe(base=source)


def _read_recipe(file: Path) -> Recipe:
    if str(file) == "-":
        return Recipe.of(parse_modelfile(sys.stdin.read(), "standard input"), Path())
    return Recipe.of(read_modelfile(file), file.parent)


def repository_name(name: str) -> str:
    """What a server calls the model; names that are not of a store's form stay as they are."""
    with suppress(InvalidArgumentError):
        return parse_name(name).repository_name
    return name


def short_id(digest: str) -> str:
    """The beginning of a digest, as people compare it."""
    return digest.removeprefix("sha256:")[:12]


@contextmanager
def shown_task() -> Iterator[StoreTask]:
    """A task whose progress is drawn on a terminal, and else written line by line; on standard error."""
    if not sys.stderr.isatty():
        yield StoreTask(_Lines().show)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        yield StoreTask(_Bars(bars).show)


class _Lines:
    """Writes each step once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def show(self, progress: Progress) -> None:
        if progress.status not in self._seen:
            self._seen.add(progress.status)
            size = f" ({bytes_text(progress.total)})" if progress.total else ""
            sys.stderr.write(f"{progress.status}{size}\n")
            sys.stderr.flush()


class _Bars:
    """A bar for each blob, and a line for each other step."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._rows: dict[str, Any] = {}

    def show(self, progress: Progress) -> None:
        if not progress.digest:
            self._bars.console.print(progress.status, markup=False, highlight=False)
            return
        if progress.digest not in self._rows:
            self._rows[progress.digest] = self._bars.add_task(progress.status, total=progress.total or None)
        self._bars.update(self._rows[progress.digest], completed=progress.completed)
