"""`modelserver list | show | load | unload | version`: the models of a running server, or of a repository."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.cli.output import AsJson, Url, print_json, print_line, print_table
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.errors import ConfigError, InvalidArgumentError, NotFoundError, ServerError, UnavailableError

Repositories = Annotated[
    list[str] | None,
    typer.Option("--model-repository", help="Read this directory, or s3://..., instead of asking a server."),
]


def register(app: typer.Typer) -> None:
    app.command("list")(list_models)
    app.command()(show)
    app.command()(load)
    app.command()(unload)
    app.command()(version)


def list_models(url: Url = DEFAULT_URL, model_repository: Repositories = None, as_json: AsJson = False) -> None:
    """List the models of a running server, or of a repository."""
    if model_repository:
        rows = _offline_rows(model_repository)
    else:
        rows = [
            {
                "name": row["name"],
                "version": row.get("version", ""),
                "state": row.get("state", "UNKNOWN"),
                "reason": row.get("reason", ""),
            }
            for row in ServerClient(url).index()
        ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("model", "version", "state", "reason"),
        [(row["name"], row["version"], row["state"], row["reason"]) for row in rows],
    )


def show(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    model_version: Annotated[str, typer.Option("--version", help="Version; default: the newest ready one.")] = "",
    url: Url = DEFAULT_URL,
    model_repository: Repositories = None,
    as_json: AsJson = False,
) -> None:
    """Show a model: its inputs and outputs, its completed config, and its statistics.

    One that no server has may be of the store: then its template, parameters, and whether it can be served.
    """
    if model_repository:
        from modelserver.cli.stored_models import read_model
        from modelserver.config.message import config_to_json
        from modelserver.repository.options import DefinitionOptions

        stored = read_model(model_repository, model, DefinitionOptions())
        if stored.definition is None:
            raise ConfigError("\n".join(str(problem) for problem in stored.problems), stored.problems)
        config = config_to_json(stored.definition.config)
        document: dict[str, Any] = {"versions": [str(number) for number in stored.definition.versions]}
    else:
        client = ServerClient(url)
        try:
            document = client.model_metadata(model, model_version)
        except (NotFoundError, UnavailableError):
            from modelserver.cli.store import show_stored

            if model_version or not show_stored(model, as_json=as_json):
                raise
            return
        config = client.model_config(model, model_version)
        document["statistics"] = client.statistics(model, model_version)
    document["config"] = config
    if as_json:
        print_json(document)
    else:
        _print_model(model, document)


def load(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    config: Annotated[Path | None, typer.Option(help="JSON file to use in place of config.pbtxt.")] = None,
    file: Annotated[list[str] | None, typer.Option(help="<version>/<path>=<local file> to use. Repeatable.")] = None,
    model_version: Annotated[str, typer.Option("--version", help="Load this version only.")] = "",
    persist: Annotated[
        bool | None, typer.Option(help="Keep the override for later starts; no: delete the stored override.")
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(help="How long a model on demand stays loaded without requests: seconds, 5m, 1h; -1: for ever."),
    ] = "",
    url: Url = DEFAULT_URL,
) -> None:
    """Load a model, or load it again; or one version of it. The server must run with --model-control-mode=explicit."""
    parameters: dict[str, str | bool] = {}
    if config is not None:
        parameters["config"] = _read(config).decode()
    for text in file or []:
        path, equals, local = text.partition("=")
        if not equals:
            raise InvalidArgumentError(f"--file expects <version>/<path>=<local file>, got '{text}'")
        parameters[f"file:{path}"] = base64.b64encode(_read(Path(local))).decode()
    if model_version:
        parameters["version"] = model_version
    if persist is not None:
        parameters["persist"] = persist
    if keep_alive:
        parameters["keep_alive"] = keep_alive
    ServerClient(url).load(model, parameters)
    print_line(f"loaded {model}")


def unload(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    dependents: Annotated[bool, typer.Option(help="Also unload the models of an ensemble's steps.")] = False,
    model_version: Annotated[str, typer.Option("--version", help="Unload this version only.")] = "",
    evict: Annotated[
        bool, typer.Option("--evict", help="For a model on demand: the next request loads it again.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Unload a model, or one version of it. The server must run with --model-control-mode=explicit."""
    parameters: dict[str, str | bool] = {"unload_dependents": dependents}
    if model_version:
        parameters["version"] = model_version
    if evict:
        parameters["evict"] = True
    ServerClient(url).unload(model, parameters)
    print_line(f"unloading {model}")


def version(url: Annotated[str, typer.Option(help="Also ask this server.")] = "", as_json: AsJson = False) -> None:
    """Print the version of this program, and of a server if one is named."""
    from importlib import metadata

    document: dict[str, Any] = {"version": metadata.version("modelserver-py")}
    if url:
        document["server"] = ServerClient(url).server_metadata()
    if as_json:
        print_json(document)
        return
    print_line(f"modelserver {document['version']}")
    if url:
        server = document["server"]
        print_line(f"{url}: {server['name']} {server['version']}, extensions: {', '.join(server['extensions'])}")


def _offline_rows(repositories: list[str]) -> list[dict[str, str]]:
    from modelserver.cli.stored_models import read_repositories
    from modelserver.repository.options import DefinitionOptions

    found, _ = read_repositories(repositories, DefinitionOptions())
    rows = []
    for stored in found:
        if stored.definition is None:
            reason = "; ".join(str(problem) for problem in stored.problems)
            rows.append({"name": stored.name, "version": "", "state": "INVALID", "reason": reason})
            continue
        rows += [
            {"name": stored.name, "version": str(number), "state": "VALID", "reason": ""}
            for number in stored.definition.versions
        ]
    return rows


def _print_model(model: str, document: dict[str, Any]) -> None:
    config = document["config"]
    print_line(f"{model}: backend {config.get('backend', '?')}, versions {', '.join(document['versions'])}")
    print_line(f"max_batch_size {config.get('max_batch_size', 0)}")
    for kind in ("input", "output"):
        rows = [(tensor["name"], tensor["data_type"], str(tensor["dims"])) for tensor in config.get(kind, [])]
        print_line("")
        print_table((kind, "data_type", "dims"), rows)
    for stats in document.get("statistics", []):
        succeeded = stats["inference_stats"]["success"]
        count = int(succeeded.get("count", 0))
        mean_ms = int(succeeded.get("ns", 0)) / count / 1e6 if count else 0.0
        print_line("")
        print_line(
            f"version {stats['version']}: {count} requests, {stats['inference_count']} rows in "
            f"{stats['execution_count']} batches, mean {mean_ms:.3f} ms"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ServerError(f"cannot read '{path}': {error.strerror}") from None
