"""A stored model as a Modelfile, which says in Ollama's words what it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from modelserver.store.draft import Description

_QUOTES = '"""'


def modelfile(source: str, described: Description, adapters: Iterable[str] = ()) -> str:
    """The text of a Modelfile `FROM source`."""
    return "\n".join(_lines(source, described, adapters)) + "\n"


def parameter_lines(described: Description) -> Iterator[str]:
    """`name value`, a line for each value: parameters may be repeated."""
    for name, value in described.parameters.items():
        for each in value if isinstance(value, list) else [value]:
            yield f"{name} {_quoted(each) if isinstance(each, str) else str(each).lower()}"


def _lines(source: str, described: Description, adapters: Iterable[str]) -> Iterator[str]:
    yield f"FROM {source}"
    for adapter in adapters:
        yield f"ADAPTER {adapter}"
    if described.template is not None:
        yield f"TEMPLATE {_quoted(described.template)}"
    if described.system is not None:
        yield f"SYSTEM {_quoted(described.system)}"
    for line in parameter_lines(described):
        yield f"PARAMETER {line}"
    for message in described.messages:
        yield f"MESSAGE {message.get('role', 'user')} {_quoted(str(message.get('content', '')))}"
    for text in described.licenses:
        yield f"LICENSE {_quoted(text)}"


def _quoted(text: str) -> str:
    """The text as a value. The grammar has no escapes: a text with three quotes can only stand bare, in one line."""
    if _QUOTES in text or text.endswith('"'):
        return " ".join(text.splitlines()) if _QUOTES in text else f"{_QUOTES}{text}\n{_QUOTES}"
    return f"{_QUOTES}{text}{_QUOTES}" if "\n" in text or '"' in text else f'"{text}"'
