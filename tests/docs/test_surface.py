"""Nothing that users of an earlier version call by name is lost."""

from __future__ import annotations

from pathlib import Path

from support.surface import missing_names, read_surface, served_surface, written_surface

BEFORE = read_surface(Path(__file__).with_name("surface.txt").read_text())


COUNTS = {
    "flags": 129,
    "config fields": 164,
    "metrics": 53,
    "http routes": 73,
    "grpc methods": 25,
    "commands": 247,
    "llm engine options": 107,
    "llm sampling parameters": 22,
    "llm metrics": 25,
    "backend parameters": 52,
}


def test_every_name_of_earlier_versions_is_there() -> None:
    assert missing_names(BEFORE, served_surface()) == []


def test_the_lists_are_whole() -> None:
    """An empty or misread list would compare as equal to anything."""
    assert {section: len(names) for section, names in BEFORE.items()} == COUNTS
    assert read_surface(written_surface(BEFORE)) == BEFORE


def test_a_missing_name_is_found() -> None:
    now = {section: set(names) for section, names in BEFORE.items()}
    for names in now.values():
        names.remove(max(names))
    assert len(missing_names(BEFORE, now)) == len(BEFORE)
    assert missing_names({"metrics": {"m{a}"}}, {"metrics": {"m{a,b}"}}) == []
    assert missing_names({"metrics": {"m{a,b}"}}, {"metrics": {"m{a}"}}) == ["metrics: m{a,b}"]
