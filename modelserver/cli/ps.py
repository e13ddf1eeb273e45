"""`modelserver ps`: the models that a server runs, their devices, and how busy they are."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from modelserver.cli.output import AsJson, Url, print_json, print_line, print_table
from modelserver.cli.usage import COLUMNS, ModelUsage, bytes_text, duration_text, model_usages, usage_cells
from modelserver.client.server_client import DEFAULT_URL, ServerClient


def register(app: typer.Typer) -> None:
    app.command()(ps)


def ps(
    url: Url = DEFAULT_URL,
    sample_s: Annotated[
        float,
        typer.Option(
            "--sample", min=0.0, help="Seconds over which requests per second are measured; 0: do not measure."
        ),
    ] = 0.5,
    is_all: Annotated[bool, typer.Option("--all", "-a", help="Include models that do not serve.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the models that serve: instances, queue, requests per second, latency, memory."""
    client = ServerClient(url)
    before, elapsed_s = None, 0.0
    if sample_s:
        before, since = client.overview(), time.monotonic()
        time.sleep(sample_s)
        elapsed_s = time.monotonic() - since
    document = client.overview()
    rates = {(row.name, row.version): row.rate for row in model_usages(document, before, elapsed_s)}
    # Latencies cover the time since the load: half a second is too short a sample.
    usages = [row for row in model_usages(document) if is_all or row.state == "READY"]
    if as_json:
        models = [_document(row, rates[row.name, row.version]) for row in usages]
        print_json({"server": document["server"], "host": document["host"], "models": models})
        return
    now_s = time.time()
    at_rate = COLUMNS.index("req/s")
    cells = [list(usage_cells(row, now_s)) for row in usages]
    for row, line in zip(usages, cells, strict=True):
        rate = rates[row.name, row.version]
        line[at_rate] = "-" if rate is None else f"{rate:.0f}"
    print_table(COLUMNS, cells)
    server = document["server"]
    print_line("")
    print_line(
        f"{url}: {'ready' if server['ready'] else 'not ready'}, up {duration_text(server['uptime_s'])}, "
        f"server {bytes_text(server['memory_bytes'])}, {server['num_threads']} threads, "
        f"{server['num_open_files']} open files"
    )
    for reason in server["reasons"]:
        print_line(f"  {reason}")


def _document(usage: ModelUsage, rate: float | None) -> dict[str, Any]:
    document = {**asdict(usage), "rate": rate}
    del document["failure_rate"]  # not measured without a sample
    return document
