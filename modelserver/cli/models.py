"""`modelserver list | show | load | unload | traffic | health | version`: a running server, or a repository."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.cli.output import AsJson, Url, print_json, print_line, print_table
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.core.numerals import parse_float
from modelserver.errors import ConfigError, InvalidArgumentError, NotFoundError, ServerError, UnavailableError

Repositories = Annotated[
    list[str] | None,
    typer.Option("--model-repository", help="Read this directory, or s3://..., instead of asking a server."),
]


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


# A slower probe counts as failed: kubelet and container engines wait a few seconds only.
TIMEOUT_S = 3.0


def health(
    url: Url = DEFAULT_URL,
    live: Annotated[bool, typer.Option("--live", help="Check only that the server runs, not its models.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")] = TIMEOUT_S,
) -> None:
    """Check whether a server is ready. Exit code 0: it is ready; 1: it is not, or does not answer.

    The variables MODELSERVER_CA_FILE, MODELSERVER_CLIENT_CERT and MODELSERVER_CLIENT_KEY name the files for TLS.
    """
    client = ServerClient(url, timeout_s=timeout_s)
    if live:
        client.check_live()
    else:
        client.check_ready()
    print_line("live" if live else "ready")


Parts = Annotated[list[str] | None, typer.Option("--weight", help="VERSION=WEIGHT. Repeat for each version.")]
Shadows = Annotated[
    list[str] | None, typer.Option("--shadow", help="VERSION=PART, 0 to 1: copies that are compared. Repeatable.")
]


def traffic(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    weight: Parts = None,
    shadow: Shadows = None,
    sticky_by: Annotated[str, typer.Option(help="What keeps requests on one version: caller, or parameter:NAME.")] = "",
    tolerance: Annotated[float | None, typer.Option(help="Difference up to which numbers count as equal.")] = None,
    persist: Annotated[bool, typer.Option("--persist", help="Keep it across restarts of the server.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Let the highest version answer again.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show how versions share a model's requests; or with --weight or --shadow set how, from the next request on."""
    client = ServerClient(url)
    if remove and (weight or shadow):
        raise InvalidArgumentError("--remove leaves no traffic: give it alone, or --weight and --shadow without it")
    document: dict[str, Any] = {}
    if remove:
        document = client.remove_traffic(model)
    elif weight or shadow:
        asked: dict[str, Any] = {
            "weights": _parts("--weight", weight or []),
            "shadows": _parts("--shadow", shadow or []),
            "sticky_by": sticky_by,
            "persist": persist,
        }
        if tolerance is not None:
            asked["tolerance"] = tolerance
        document = client.set_traffic(model, asked)
    else:
        document = client.traffic(model)
    if as_json:
        print_json(document)
    else:
        _print(model, document)


def _parts(flag: str, texts: list[str]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for text in texts:
        version, _, number = text.partition("=")
        try:
            parts[version.strip()] = parse_float(number)
        except ValueError:
            raise InvalidArgumentError(f"{flag} expects VERSION=NUMBER, got '{text}'") from None
    return parts


def _print(model: str, document: dict[str, Any]) -> None:
    weights, shadows = document.get("weights", {}), document.get("shadows", {})
    if not weights and not shadows:
        print_line(f"{model}: the highest version answers")
        return
    counts = document.get("shadow_counts", {})
    total = sum(weights.values()) or 1.0
    # While no version is ready (such as an unloaded model on demand): the shares that it will have.
    shares = document.get("shares") or {version: weight / total for version, weight in weights.items()}
    rows = [
        (
            version,
            f"{100 * shares.get(version, 0.0):.4g} %" if version in weights or version in shares else "",
            f"{100 * shadows[version]:g} %" if version in shadows else "",
            ", ".join(f"{number} {result}" for result, number in sorted(counts.get(version, {}).items())),
        )
        for version in sorted({*weights, *shadows, *shares}, key=int)
    ]
    print_table(("version", "answers", "copies", "compared"), rows)
    if document.get("sticky_by"):
        print_line(f"sticky by: {document['sticky_by']}")
