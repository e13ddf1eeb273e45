"""Draws the plots of the gallery from the tables of performance.md: `python docs/plots.py`.

The pictures are SVG files in docs/images/plots/. They hold no figure that the tables do not hold; a test draws them
again and compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PERFORMANCE = DOCS / "performance.md"
IMAGES = DOCS / "images" / "plots"

_OURS, _PEER, _THIRD = "#00796b", "#90a4ae", "#ffb300"
_INK, _LINE, _PAPER = "#263238", "#cfd8dc", "#ffffff"
_FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"
_BAR, _GAP, _LABELS, _WIDTH = 18, 6, 250, 760


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a page as rows of cells, the header first."""
    found: list[list[list[str]]] = []
    is_inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not is_inside:
            found.append([])
            is_inside = True
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            found[-1].append(cells)
    return found


def table(text: str, *, columns: Sequence[str], key: str) -> list[list[str]]:
    """The rows of the table that has these columns and a row that begins with `key`."""
    for rows in tables(text):
        if rows[0][: len(columns)] == list(columns) and any(row[0] == key for row in rows[1:]):
            return rows[1:]
    raise LookupError(f"performance.md has no table {columns} with a row '{key}'")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart."""

    label: str
    value: float
    colour: str


def bars(title: str, unit: str, groups: Mapping[str, Sequence[Bar]]) -> str:
    """A chart of horizontal bars in groups, all on one scale from zero."""
    longest = max(bar.value for group in groups.values() for bar in group)
    height = 64 + sum(30 + len(group) * (_BAR + _GAP) for group in groups.values())
    room = _WIDTH - _LABELS - 100
    parts = [_text(16, 28, title, size=17, weight="bold"), _text(16, 48, unit, size=12)]
    y = 64
    for name, group in groups.items():
        parts.append(_text(16, y + 16, name, size=13, weight="bold"))
        y += 26
        for bar in group:
            width = max(1.0, bar.value / longest * room)
            parts.append(_text(_LABELS - 8, y + 13, bar.label, size=12, anchor="end"))
            parts.append(
                f"<rect x='{_LABELS}' y='{y}' width='{width:.1f}' height='{_BAR}' rx='2' fill='{bar.colour}'/>"
            )
            parts.append(
                _text(
                    _LABELS + width + 6,
                    y + 13,
                    f"{bar.value:,.4g}" if bar.value < 1000 else f"{bar.value:,.0f}",
                    size=12,
                )
            )
            y += _BAR + _GAP
        y += 4
    return _svg(_WIDTH, height, parts, title)


def lines(title: str, x_axis: str, y_axis: str, curves: Mapping[str, tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """A chart of curves, each with a colour, over the same values of x in equal steps."""
    height, left, right, top, bottom = 340, 70, 170, 64, 46
    xs = sorted({x for _, points in curves.values() for x, _ in points})
    highest = math.ceil(max(y for _, points in curves.values() for _, y in points) / 20) * 20
    step = (_WIDTH - left - right) / (len(xs) - 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + xs.index(x) * step, height - bottom - y / highest * (height - top - bottom)

    parts = [_text(16, 28, title, size=17, weight="bold"), _text(16, 48, y_axis, size=12)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = place(xs[0], highest * share)[1]
        parts.append(f"<line x1='{left}' y1='{y:.1f}' x2='{_WIDTH - right}' y2='{y:.1f}' stroke='{_LINE}'/>")
        parts.append(_text(left - 8, y + 4, f"{highest * share:.0f}", size=12, anchor="end"))
    parts += [_text(place(x, 0)[0], height - bottom + 18, f"{x:g}x", size=12, anchor="middle") for x in xs]
    parts.append(_text((left + _WIDTH - right) / 2, height - 8, x_axis, size=12, anchor="middle"))
    for name, (colour, points) in curves.items():
        places = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2.5'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>" for x, y in places]
        parts.append(_text(places[-1][0] + 10, places[-1][1] + 4, name, size=12))
    return _svg(_WIDTH, height, parts, title)


def _text(x: float, y: float, text: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    style = f"font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' fill='{_INK}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"


def _svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' role='img' {_FONT}>"
    paper = f"<rect width='{width}' height='{height}' rx='8' fill='{_PAPER}'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


_SERVERS = ("case", "server", "concurrency", "requests/s", "server CPU µs")
_NAMES = {"modelserver": "modelserver", "worker": "modelserver, batching worker", "triton": "Triton (C++)"}
_PYTHON_SERVERS = {
    "modelserver": "modelserver",
    "mlserver": "MLServer",
    "batching mlserver": "MLServer, batching",
    "kserve": "KServe",
    "litserve": "LitServe",
}


def _served(text: str, key: str, case: str, concurrency: int) -> list[tuple[str, float, float]]:
    """Server, requests per second and CPU per request of a case."""
    rows = table(text, columns=_SERVERS, key=key)
    return [(row[1], float(row[3]), float(row[4])) for row in rows if row[0] == case and row[2] == str(concurrency)]


def _groups(text: str, index: int) -> dict[str, list[Bar]]:
    """Case i and j at 32 requests at a time, l beside Python servers; `index` 1 is throughput and 2 is CPU."""
    groups: dict[str, list[Bar]] = {}
    for name, case in {
        "identity over gRPC": "i",
        "identity over HTTP, binary": "j binary",
        "identity over HTTP, JSON": "j JSON",
    }.items():
        groups[name] = [
            Bar(_NAMES[row[0]], row[index], _PEER if row[0] == "triton" else _OURS)
            for row in _served(text, "i", case, 32)
            if row[0] in _NAMES
        ]
    return groups


def throughput(text: str) -> str:
    return bars(
        "Requests per second, 32 at a time",
        "More is better. The same two cores for both servers and the load.",
        _groups(text, 1),
    )


def cpu(text: str) -> str:
    return bars("CPU per request, 32 at a time", "Microseconds of the server's CPU. Less is better.", _groups(text, 2))


def python_servers(text: str) -> str:
    groups = {
        f"digits on ONNX Runtime, {name}": [
            Bar(_PYTHON_SERVERS[server], rate, _OURS if server == "modelserver" else _PEER)
            for server, rate, _ in _served(text, "i", case, 32)
            if server in _PYTHON_SERVERS
        ]
        for name, case in {"gRPC": "l gRPC", "HTTP, binary": "l binary", "HTTP, JSON": "l JSON"}.items()
    }
    return bars("Beside other Python servers", "Requests per second, 32 at a time. More is better.", groups)


def python_models(text: str) -> str:
    groups = {
        f"{protocol}, {n} at a time": [
            Bar(_NAMES[server].replace("(C++)", "Python backend"), rate, _OURS if server == "modelserver" else _PEER)
            for server, rate, _ in _served(text, "g http [1,16]", f"g {key} [1,16]", n)
        ]
        for protocol, key in (("HTTP", "http"), ("gRPC", "grpc"))
        for n in (1, 8, 32)
    }
    return bars("The same model.py on two servers", "Requests per second. More is better.", groups)


def batching(text: str) -> str:
    rows = _served(text, "e", "e", 64)
    names = {"batched": "with dynamic batching", "single": "without"}
    groups = {
        "an MLP of 64-3072-3072-10 on one thread": [
            Bar(names[server], rate, _OURS if server == "batched" else _PEER) for server, rate, _ in rows
        ]
    }
    return bars("What dynamic batching gains", "Requests per second, 64 at a time. More is better.", groups)


def language_models(text: str) -> str:
    rows = table(text, columns=("model", "threads", "tokens/s", "transformers"), key="100 M")
    groups = {
        f"{row[0].replace('`', '')}, {row[1]} threads" if row[1] != "1" else f"{row[0].replace('`', '')}, 1 thread": [
            Bar("modelserver", float(row[2].replace(",", "")), _OURS),
            Bar("transformers, static batches", float(row[3].replace(",", "")), _PEER),
        ]
        for row in rows
        if row[3]
    }
    return bars("Language models on a CPU", "Tokens per second, 32 requests at a time. More is better.", groups)


def overload(text: str) -> str:
    rows = table(text, columns=("", "load", "answered in time /s"), key="HTTP, admission on")
    curves = {
        name: (colour, [(float(row[1].rstrip("x")), float(row[2])) for row in rows if row[0] == key])
        for name, colour, key in (
            ("with admission", _OURS, "HTTP, admission on"),
            ("without", _THIRD, "HTTP, admission off"),
        )
    }
    return lines(
        "Overload",
        "offered load, in multiples of what the model can do",
        "Answers per second that came in time, over HTTP",
        curves,
    )


def _box(x: float, y: float, width: float, height: float, title: str, rest: Sequence[str], colour: str) -> list[str]:
    parts = [f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{colour}' stroke='{_OURS}'/>"]
    parts.append(_text(x + width / 2, y + 24, title, size=14, weight="bold", anchor="middle"))
    parts += [
        _text(x + width / 2, y + 46 + 18 * index, line, size=12, anchor="middle") for index, line in enumerate(rest)
    ]
    return parts


def overview(_: str) -> str:
    """The server in one picture; it has no figures."""
    boxes: list[tuple[str, Sequence[str]]] = [
        ("Clients", ("Triton's and KServe's", "OpenAI's", "curl, gRPC, a shell", "SageMaker, Vertex AI")),
        (
            "Protocols",
            ("HTTP/1.1, HTTP/2, gRPC", "TLS, API keys, quotas", "JSON, tensors, streams", "one port or several"),
        ),
        ("Queues", ("dynamic batches", "priorities, deadlines", "sequences, ensembles", "response cache")),
        ("Backends", ("ONNX Runtime, PyTorch", "TensorRT, Python", "language models", "your own")),
    ]
    width, gap, top = 160, 32, 64
    parts = [_text(16, 32, "One process serves models of every kind", size=17, weight="bold")]
    for index, (title, rest) in enumerate(boxes):
        x = 16 + index * (width + gap)
        parts += _box(x, top, width, 124, title, rest, "#e0f2f1" if index else "#fff8e1")
        if index:
            y = top + 62
            parts.append(f"<path d='M{x - gap + 4} {y} H{x - 8}' stroke='{_INK}' stroke-width='2'/>")
            parts.append(f"<path d='M{x - 12} {y - 5} L{x - 3} {y} L{x - 12} {y + 5} Z' fill='{_INK}'/>")
    parts += _box(
        16 + width + gap,
        top + 152,
        3 * width + 2 * gap,
        66,
        "Model repository",
        ("versions, hot reload without a lost request, canaries, load on demand, object stores",),
        "#eceff1",
    )
    return _svg(800, 300, parts, "Clients speak to protocols, which fill queues, from which backends take batches")


PLOTS: Mapping[str, Callable[[str], str]] = {
    "overview": overview,
    "throughput": throughput,
    "cpu": cpu,
    "python_servers": python_servers,
    "python_models": python_models,
    "batching": batching,
    "language_models": language_models,
    "overload": overload,
}


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    figures = PERFORMANCE.read_text()
    for name, draw in PLOTS.items():
        (IMAGES / f"{name}.svg").write_text(draw(figures))
