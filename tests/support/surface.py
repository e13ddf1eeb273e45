"""What users may rely on by name: flags, config fields, metrics, routes, commands and options of the backends.

`python tests/support/surface.py` prints the lists of this version in the form of `tests/docs/surface.txt`.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate import messages, metrics, served_routes  # noqa: E402
from modelserver.app.frontends import grpc_frontend, http_frontend  # noqa: E402
from modelserver.app.server import Server  # noqa: E402
from modelserver.auth.access import Access  # noqa: E402
from modelserver.auth.guard import Guard  # noqa: E402
from modelserver.cli.main import app  # noqa: E402
from modelserver.frontends.http.clouds import sagemaker_api  # noqa: E402
from modelserver.options.server_options import ServerOptions  # noqa: E402
from modelserver.options.table import option_table  # noqa: E402
from modelserver.protocol.limits import HttpLimits  # noqa: E402

# Section -> its names. A name of several words, such as "bench --url", is what its last word stands for in the others.
Surface = Mapping[str, set[str]]


def served_surface() -> dict[str, set[str]]:
    """The names of this version."""
    return {
        "flags": set(_flags()),
        "config fields": {f"{message} {field}" for message, fields in _config_fields() for field in fields},
        "metrics": set(_metrics()),
        "http routes": set(served_routes()) | asyncio.run(_sagemaker_routes()),
        "grpc methods": asyncio.run(_grpc_methods()),
        "commands": set(_commands(typer.main.get_command(app), ())),
        "llm engine options": _llm_engine_options(),
        "llm sampling parameters": set(_llm("sampling_params").SamplingParams.__dataclass_fields__),
        "llm metrics": _llm_metrics(),
        "backend parameters": set(_backend_parameters()),
    }


def read_surface(text: str) -> dict[str, set[str]]:
    """The names in the form of `tests/docs/surface.txt`: `a b: c d` stands for "a b c" and "a b d"."""
    found: dict[str, set[str]] = {}
    for section, body in re.findall(r"^\[(.+)\]\n((?:.+\n)*)", text, re.MULTILINE):
        names = found[section] = set()
        for line in re.sub(r"\n {4}", " ", body).splitlines():
            first, colon, rest = line.partition(": ")
            names.update(f"{first} {word}" for word in rest.split()) if colon else names.update(line.split())
    return found


def written_surface(surface: Surface) -> str:
    return "\n".join(f"[{section}]\n{''.join(_lines(names))}" for section, names in surface.items())


def missing_names(before: Surface, now: Surface) -> list[str]:
    """Those of `before` that `now` lacks. A metric may have got further labels."""
    metrics_now = [_labelled(name) for name in now.get("metrics", ())]
    missing = []
    for section, names in before.items():
        for name in sorted(names - now.get(section, set())):
            metric, labels = _labelled(name)
            if section != "metrics" or not any(metric == one and labels <= more for one, more in metrics_now):
                missing.append(f"{section}: {name}")
    return missing


def _labelled(name: str) -> tuple[str, set[str]]:
    metric, _, labels = name.rstrip("}").partition("{")
    return metric, set(labels.split(",")) - {""}


def _lines(names: Iterable[str]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        first, _, word = name.rpartition(" ")
        groups.setdefault(first, []).append(word)
    for first, words in groups.items():
        line = " ".join(words) if not first else f"{first}: {' '.join(words)}"
        wrapped = textwrap.wrap(line, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        yield "\n".join(wrapped) + "\n"


def _flags() -> Iterator[str]:
    for option in option_table():
        for name in (option.name, *option.flag.aliases):
            yield f"--{name.replace('_', '-')}"


def _config_fields() -> Iterator[tuple[str, list[str]]]:
    for name, message in messages().items():
        yield name, [field.name for field in message.fields]


def _metrics() -> Iterator[str]:
    for name, labels in re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) ?\|", metrics(), re.MULTILINE):
        yield f"{name}{{{','.join(sorted(re.findall(r'[a-z_]+', labels)))}}}"


async def _sagemaker_routes() -> set[str]:
    server = Server(ServerOptions())
    planes = server.dataplane, server.controlplane
    v2 = http_frontend(*planes).apis[0]
    api = sagemaker_api(v2, Guard(Access()), *planes, HttpLimits(), model="", inference_type="infer", port=8080)
    return {f"{route.method} {route.pattern}" for route in api.routes}


async def _grpc_methods() -> set[str]:
    server = Server(ServerOptions())
    paths = grpc_frontend(server.dataplane, server.controlplane).methods
    return {path.removeprefix("/").replace("/", " ") for path in paths}


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[str]:
    for parameter in command.params:
        names = parameter.opts + parameter.secondary_opts
        for name in names if parameter.param_type_name == "option" else [f"<{parameter.name}>"]:
            yield " ".join([*path, name])
    for name, inner in getattr(command, "commands", {}).items():
        yield " ".join([*path, name])
        yield from _commands(inner, (*path, name))


def _llm(module: str):  # type: ignore[no-untyped-def]  # a backend's own modules
    return importlib.import_module(f"modelserver_backends.llm.{module}")


def _llm_engine_options() -> set[str]:
    options = _llm("options")
    return {*options.CONVERTERS, *options.WITHOUT_MEANING, *options.NEUTRAL}


def _llm_metrics() -> set[str]:
    statistics = _llm("engine_statistics").EngineStatistics(max_model_len=8)
    return {measurement.name for measurement in _llm("engine_statistics").measure(statistics)}


def _backend_parameters() -> Iterator[str]:
    """Those that docs/configuration.md lists, if the sources of the backend, or of the server, have them too."""
    page = (ROOT / "docs" / "configuration.md").read_text().partition("\n## Parameters of the backends\n")[2]
    table = page.partition("\n## ")[0]
    for backends, keys in re.findall(r"^\| ([a-z, ]+) \| (`.+?) \|", table, re.MULTILINE):
        for backend in backends.split(", "):
            sources = _sources("modelserver") + ("" if backend == "all" else _sources(f"backends/{backend}"))
            yield from (f"{backend} {key}" for key in re.findall("`([^`*]+)`", keys) if f'"{key}"' in sources)


def _sources(directory: str) -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / directory).rglob("*.py")))


if __name__ == "__main__":
    print(written_surface(served_surface()), end="")
