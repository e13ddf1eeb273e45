"""Charts as SVG text: lines, histograms, stacked bars. Colours are classes that the page defines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 44
NUM_TICKS = 5
# The approximate width and height of a letter. Labels without enough room are cut; hovering shows them whole.
LETTER_WIDTH, LETTER_HEIGHT = 6.2, 11
_LABEL_WIDTHS = (142, 460)


@dataclass(frozen=True, slots=True)
class Point:
    """`note` is shown on hover, `mark` beside the point."""

    x: float
    y: float
    note: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """A line; `color` is a number of the page's palette."""

    name: str
    color: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a stacked bar."""

    name: str
    color: int
    value: float


def short(number: float) -> str:
    """A number for an axis or a label: three digits, with k and M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(number) >= limit * 10 or (unit == "M" and abs(number) >= limit):
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def ticks(high: float) -> list[float]:
    """Round numbers from 0 up to at least `high`."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / NUM_TICKS
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    return [step * number for number in range(math.ceil(high / step - 1e-9) + 1)]


class _Plane:
    """Numbers to places of the drawing."""

    def __init__(self, x_high: float, y_high: float) -> None:
        self.x_ticks, self.y_ticks = ticks(x_high), ticks(y_high)

    def x(self, value: float) -> float:
        return LEFT + value / self.x_ticks[-1] * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_name: str, y_name: str) -> list[str]:
        parts = []
        for value in self.y_ticks:
            place = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{short(value)}</text>'
            )
        parts += [
            f'<text class="tick" x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{short(value)}</text>'
            for value in self.x_ticks
        ]
        parts.append(_axis_names(x_name, y_name))
        return parts


def _axis_names(x_name: str, y_name: str) -> str:
    middle = (HEIGHT - BOTTOM + TOP) / 2
    return (
        f'<text class="axis" x="{(WIDTH + LEFT - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_name)}</text>"
        f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_name)}</text>"
    )


def _svg(parts: Sequence[str], title: str, size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    head = f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(title)}">'
    return head + "".join(parts) + "</svg>"


def line_chart(series: Sequence[Series], *, title: str, x_name: str, y_name: str) -> str:
    """Lines with a dot at each point."""
    points = [point for one in series for point in one.points]
    plane = _Plane(max((point.x for point in points), default=1.0), max((point.y for point in points), default=1.0))
    parts = plane.axes(x_name, y_name)
    for one in series:
        places = [(plane.x(point.x), plane.y(point.y)) for point in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line s{one.color}" points="{path}"/>')
        for point, (x, y) in zip(one.points, places, strict=True):
            parts.append(
                f'<circle class="dot s{one.color}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(point.note)}</title>'
                "</circle>"
            )
            if point.mark:
                above = max(y - 9, LETTER_HEIGHT)
                parts.append(
                    f'<text class="mark" x="{x:.1f}" y="{above:.1f}" text-anchor="middle">{escape(point.mark)}</text>'
                )
    return _svg(parts, title) + legend([(one.name, one.color) for one in series])


def histogram(edges: Sequence[float], counts: Sequence[int], marks: Sequence[tuple[str, float]], *, title: str) -> str:
    """Counts between edges that grow by a factor, so all bars are of one width; `marks` are lines at values."""
    if not counts or not edges:
        return ""
    low, high = math.log(edges[0]), math.log(edges[-1])
    top, bottom = TOP + 14, HEIGHT - BOTTOM
    most = max(counts)

    def place(value: float) -> float:
        return LEFT + (math.log(min(max(value, edges[0]), edges[-1])) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = []
    for number, count in enumerate(counts):
        left, right = place(edges[number]), place(edges[number + 1])
        tall = count / most * (bottom - top)
        note = f"{short(edges[number])} to {short(edges[number + 1])} us: {count}"
        parts.append(
            f'<rect class="bar s0" x="{left + 0.5:.1f}" y="{bottom - tall:.1f}" '
            f'width="{max(right - left - 1, 0.5):.1f}" height="{tall:.1f}"><title>{escape(note)}</title></rect>'
        )
    parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for number in range(6):
        value = math.exp(low + (high - low) * number / 5)
        parts.append(
            f'<text class="tick" x="{place(value):.1f}" y="{bottom + 18}" text-anchor="middle">{short(value)}</text>'
        )
    for number, (name, value) in enumerate(marks):
        x = place(value)
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(
            f'<text class="mark" x="{x:.1f}" y="{top - 4 - 11 * (number % 2)}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    parts.append(
        f'<text class="axis" x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">latency (us)</text>'
    )
    return _svg(parts, title)


def stacked_bars(rows: Sequence[tuple[str, Sequence[Part]]], *, title: str, unit: str) -> str:
    """A horizontal bar per row, made of parts."""
    high = max((sum(part.value for part in parts) for _, parts in rows), default=0.0) or 1.0
    least, most = _LABEL_WIDTHS
    left = 8 + round(min(max(least, max((len(name) for name, _ in rows), default=0) * LETTER_WIDTH), most))
    step, width = 30, 1080
    drawn = []
    for number, (name, parts) in enumerate(rows):
        y = TOP + number * step
        drawn.append(
            f'<text class="tick" x="{left - 8}" y="{y + 15}" text-anchor="end"><title>{escape(name)}</title>'
            f"{escape(_cut(name, int((left - 8) / LETTER_WIDTH)))}</text>"
        )
        x = float(left)
        for part in parts:
            wide = part.value / high * (width - left - 80)
            note = f"{name}, {part.name}: {short(part.value)} {unit}"
            drawn.append(
                f'<rect class="bar s{part.color}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="20">'
                f"<title>{escape(note)}</title></rect>"
            )
            x += wide
        total = sum(part.value for part in parts)
        drawn.append(f'<text class="tick" x="{x + 6:.1f}" y="{y + 15}">{short(total)} {escape(unit)}</text>')
    names = {part.name: part.color for _, parts in rows for part in parts}
    return _svg(drawn, title, (width, TOP * 2 + step * len(rows))) + legend(list(names.items()))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def legend(entries: Sequence[tuple[str, int]]) -> str:
    items = "".join(f'<span><i class="s{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<p class="legend">{items}</p>'
