"""`modelserver traffic`: the versions that share a model's requests, and the versions that get copies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from modelserver.cli.output import AsJson, Url, print_json, print_line, print_table
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.core.numerals import parse_float
from modelserver.errors import InvalidArgumentError

Parts = Annotated[list[str] | None, typer.Option("--weight", help="VERSION=WEIGHT. Repeat for each version.")]
Shadows = Annotated[
    list[str] | None, typer.Option("--shadow", help="VERSION=PART, 0 to 1: copies that are compared. Repeatable.")
]


def register(app: typer.Typer) -> None:
    app.command()(traffic)


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
