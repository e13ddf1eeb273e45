"""`modelserver run`: asks a model by its name or path, which is pulled and served as needed."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.cli.chat import Images, chat
from modelserver.cli.infer import InputSpec, ask, read_specs
from modelserver.cli.output import Steps, print_table
from modelserver.cli.store import Directory, shown_task
from modelserver.client.address import OLLAMA_VARIABLE, URL_VARIABLE, usual_url
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError
from modelserver.store.names import FilePlace, parse_place
from modelserver.store.store import Store

_LOOK_TIMEOUT_S = 5.0


def run(
    model: Annotated[str, typer.Argument(help="Name of a model, which is pulled if it is absent; or its path.")],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="Ask this and exit after the answer. Of other models: JSON, text, a file, or NAME=VALUE."),
    ] = None,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 always picks the most likely token.")] = None,
    image: Images = None,
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
    allow_pickle_models: Annotated[
        bool, typer.Option("--allow-pickle-models", help="Load a pickled model: it may run any code.")
    ] = False,
    store: Directory = None,
) -> None:
    """Talk to a language model, or ask any other model once, by its name or path.

    A running server that has it is asked. Otherwise it is served here, from the store, into which it is pulled if need
    be. Without a terminal, all of standard input is one message.
    """
    with ExitStack() as stack:
        name, address = _serving(stack, model, url, store, allow_pickle_models)
        client = ServerClient(address)
        if _generates_text(client, name):
            chat(name, " ".join(prompt) if prompt else None, system, max_tokens, temperature, image, address)
        else:
            _ask_once(client, name, prompt or [])


def _generates_text(client: ServerClient, model: str) -> bool:
    try:
        client.language_model(model)
    except NotFoundError:
        client.model_metadata(model)  # raises if the server does not have the model at all
        return False
    return True


def _ask_once(client: ServerClient, model: str, words: list[str]) -> None:
    """Send the words as the inputs; without any, standard input, or show which inputs there are."""
    specs = read_specs(client, model)
    if not words and sys.stdin.isatty():
        rows = [(spec.name, spec.datatype.value, str(list(spec.shape))) for spec in specs.values()]
        print_table(("input", "datatype", "shape"), rows)
        return
    if len(words) < 2 and not _named(words, specs):
        word = words[0] if words else "@-"
        given = _json_object(word)
        if given is not None and given.keys() <= specs.keys():
            words = [f"{name}={json.dumps(value)}" for name, value in given.items()]
        elif len(specs) == 1:
            (name,) = specs
            words = [f"{name}={'@' if Path(word).is_file() else ''}{word}"]
        else:
            raise InvalidArgumentError(f"model '{model}' has several inputs: give NAME=VALUE for {', '.join(specs)}")
    ask(client, model, specs, words)


def _named(words: list[str], specs: Mapping[str, InputSpec]) -> bool:
    return any(word.partition("=")[0] in specs for word in words if "=" in word)


def _json_object(word: str) -> dict[str, Any] | None:
    try:
        document = json.loads(word)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _serving(
    stack: ExitStack, model: str, url: str, directory: Path | None, allow_pickle_models: bool
) -> tuple[str, str]:
    """The model's name, and the address of a server that has it."""
    path = _path_of(model)
    if url:
        if path is not None:
            raise InvalidArgumentError(
                f"'{model}' is a path, and --url ({URL_VARIABLE}, {OLLAMA_VARIABLE}) names the server to ask: give the "
                "name of one of its models, or leave the address out and the path is served here"
            )
        return model, url
    if path is not None:
        address = stack.enter_context(
            _serve(model, model_repository=str(path), allow_pickle_models=allow_pickle_models)
        )
        return _only_model(address, path), address
    if directory is None and _has_model(DEFAULT_URL, model):
        return model, DEFAULT_URL
    store = Store(directory)
    try:
        name = store.find(model).name
    except NotFoundError:
        if Path(model).is_dir():
            return _serving(stack, f"./{model}", url, directory, allow_pickle_models)
        if _names_a_file(model):
            raise NotFoundError(f"there is no file '{model}', and no model of that name in the store") from None
        with shown_task() as task:
            name = store.pull(model, task=task)
    return name.repository_name, stack.enter_context(
        _serve(name.repository_name, store=str(store.directory), allow_pickle_models=allow_pickle_models)
    )


def _path_of(model: str) -> Path | None:
    """The path that is meant: one that looks like a path, or a file of that name."""
    path = Path(model).expanduser()
    if path.is_file() or ("/" in model and path.is_dir()):
        return path
    place = parse_place(model) if "://" not in model else None
    return place.path if isinstance(place, FilePlace) else None


def _names_a_file(model: str) -> bool:
    """Whether it ends like a model's file, and is no address."""
    from modelserver.backend.discovery import BUNDLED  # takes a while

    endings = {Path(name).suffix for bundled in BUNDLED.values() for name in bundled.filenames} - {""}
    return Path(model).suffix.lower() in endings and "." not in "".join(model.split("/")[:-1])


def _has_model(url: str, model: str) -> bool:
    """Whether a server answers there and has the model."""
    client = ServerClient(url, timeout_s=_LOOK_TIMEOUT_S)
    try:
        client.language_model(model)
    except (UnavailableError, NotFoundError):
        return False
    return True


def _only_model(url: str, path: Path) -> str:
    """The name of the model that is served there. Raises InvalidArgumentError for several, or if it does not load."""
    rows = ServerClient(url).index()
    names = sorted({row["name"] for row in rows})
    if len(names) == 1 and all(row.get("state") == "UNAVAILABLE" for row in rows):
        raise InvalidArgumentError(
            next((row["reason"] for row in rows if row.get("reason")), f"'{path}' does not load")
        )
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
    # Why a load fails is this command's own error.
    logging.getLogger("modelserver.repository.lifecycle").setLevel(logging.CRITICAL)
    try:
        with Steps() as steps:
            steps.show(f"loading {name}")
            server.start()
            url = f"http://{server.http_url}"
            if "store" in options:
                ServerClient(url).model_metadata(name)  # which loads it
        yield url
    finally:
        server.stop()
        logs.close()
