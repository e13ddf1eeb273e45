"""One HTML file that needs nothing else: style, sections, tables. Supports light and dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2128; --soft: #5c6570; --rule: #e3e6ea;
  --bad: #b42318; --s0: #2f6fde; --s1: #e0662f; --s2: #2a9d74; --s3: #b8860b; --s4: #8457c9; --s5: #98a1ab; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #e7eaee; --soft: #9aa4af;
  --rule: #30363d; --bad: #ff8a7a; --s0: #6ea3ff; --s1: #ff9a63; --s2: #56c596; --s3: #e3b341; --s4: #b494f0;
  --s5: #6b7480; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 0 0 6px; font-weight: 600; }
.sub, .note { color: var(--soft); margin: 0 0 18px; }
.scroll + .note { margin: 8px 0 0; } .bad { color: var(--bad); font-weight: 600; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px;
  margin: 0 0 18px; }
.facts { display: flex; flex-wrap: wrap; gap: 10px 32px; } .facts div { min-width: 120px; }
.facts b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; } .facts span { color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 18px; }
.scroll { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); stroke-width: 1; } .rule { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; }
.tick { fill: var(--soft); font-size: 11px; } .axis { fill: var(--soft); font-size: 12px; }
.mark { fill: var(--ink); font-size: 11px; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; } .dot { stroke: var(--card); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
"""
_COLORS = "".join(
    f".line.s{number} {{ stroke: var(--s{number}); }} .dot.s{number}, .bar.s{number} {{ fill: var(--s{number}); }} "
    f".legend i.s{number} {{ background: var(--s{number}); }}\n"
    for number in range(6)
)


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in entries)
    return f'<div class="facts">{items}</div>'


def pair(*parts: tuple[str, str]) -> str:
    """Titled charts side by side."""
    items = "".join(f"<div><h3>{escape(title)}</h3>{chart}</div>" for title, chart in parts if chart)
    return f'<div class="pair">{items}</div>'


def warning(text: str) -> str:
    return f'<p class="bad">{escape(text)}</p>'


def page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_COLORS}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>{"".join(sections)}</main></body></html>\n'
    )
