"""`modelserver run`: a conversation with a model by its name or path, which is pulled and served as needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.cli.chat import chat
from modelserver.cli.output import Steps
from modelserver.cli.store import Directory, shown_task
from modelserver.client.address import OLLAMA_VARIABLE, URL_VARIABLE, usual_url
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError
from modelserver.store.names import FilePlace, parse_place
from modelserver.store.store import Store

_LOOK_TIMEOUT_S = 5.0


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    model: Annotated[str, typer.Argument(help="Name of a model, which is pulled if it is absent; or its path.")],
    prompt: Annotated[str | None, typer.Argument(help="Ask this and exit after the answer.")] = None,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 always picks the most likely token.")] = None,
    url: Annotated[
        str,
        typer.Option(
            "--url",
            "-u",
            envvar=[URL_VARIABLE, OLLAMA_VARIABLE],
            callback=usual_url,
            help="Ask this server, and no other.",
        ),
    ] = "",
    store: Directory = None,
) -> None:
    """Talk to a model by its name or path.

    A running server that has it is asked. Otherwise it is served here, from the store, into which it is pulled if need
    be. Without a terminal, all of standard input is one message.
    """
    with ExitStack() as stack:
        name, address = _serving(stack, model, url, store)
        chat(name, prompt, system, max_tokens, temperature, address)


def _serving(stack: ExitStack, model: str, url: str, directory: Path | None) -> tuple[str, str]:
    """The model's name, and the address of a server that has it."""
    if url:
        return model, url
    if path := _path_of(model):
        address = stack.enter_context(_serve(model, model_repository=str(path)))
        return _only_model(address, path), address
    if directory is None and _has_model(DEFAULT_URL, model):
        return model, DEFAULT_URL
    store = Store(directory)
    try:
        name = store.find(model).name
    except NotFoundError:
        with shown_task() as task:
            name = store.pull(model, task=task)
    return name.repository_name, stack.enter_context(_serve(name.repository_name, store=str(store.directory)))


def _path_of(model: str) -> Path | None:
    """The path that is meant: one that looks like a path, or a file of that name."""
    path = Path(model).expanduser()
    if path.is_file() or ("/" in model and path.is_dir()):
        return path
    place = parse_place(model) if "://" not in model else None
    return place.path if isinstance(place, FilePlace) else None


def _has_model(url: str, model: str) -> bool:
    """Whether a server answers there and has the model."""
    client = ServerClient(url, timeout_s=_LOOK_TIMEOUT_S)
    try:
        client.language_model(model)
    except (UnavailableError, NotFoundError):
        return False
    return True


def _only_model(url: str, path: Path) -> str:
    names = sorted({row["name"] for row in ServerClient(url).index()})
    if len(names) != 1:
        raise InvalidArgumentError(f"'{path}' holds {len(names)} models; name the path of one: {', '.join(names)}")
    return str(names[0])


@contextmanager
def _serve(name: str, **options: Any) -> Iterator[str]:
    """A server in this process, with the model in memory; yields its address."""
    from modelserver.app.logs import start_logs
    from modelserver.embed.server import Server

    repository = options.pop("model_repository", ())
    server = Server(
        repository,
        http_address="127.0.0.1",
        http_port=0,
        allow_grpc=False,
        allow_metrics=False,
        log_info=False,
        log_warning=False,
        exit_timeout_secs=5,
        **options,
    )
    logs = start_logs(server.prepare())
    try:
        with Steps() as steps:
            steps.show(f"loading {name}")
            server.start()
            url = f"http://{server.http_url}"
            if options:
                ServerClient(url).model_metadata(name)  # which loads it
        yield url
    finally:
        server.stop()
        logs.close()
