"""A stop string is found where str.find finds it in the whole text, however the text was cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from modelserver_backends.llm.text.text_stream import StopStrings

TEXT = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def _cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def _run(pieces: list[str], stops: list[str], is_included: bool) -> tuple[str, str | None]:
    search = StopStrings(stops, is_included=is_included)
    given_text = ""
    for piece in pieces:
        delta, stop = search.push(piece)
        given_text += delta
        if stop is not None:
            return given_text, stop
    return given_text + search.flush(), None


def _expected(text: str, stops: list[str], is_included: bool) -> tuple[str, str | None]:
    matches = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    end, start, stop = min(matches)
    return text[: end if is_included else start], stop


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=20), st.booleans())
def test_it_equals_find(text: str, stops: list[str], cuts: list[int], is_included: bool) -> None:
    assert _run(_cut(text, cuts), stops, is_included) == _expected(text, stops, is_included)


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=20))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str], cuts: list[int]) -> None:
    search, seen, given_text = StopStrings(stops, is_included=False), "", ""
    for piece in _cut(text, cuts):
        delta, stop = search.push(piece)
        seen, given_text = seen + piece, given_text + delta
        if stop is not None:
            return
        held = seen[len(given_text) :]
        assert seen.startswith(given_text)
        assert held == "" or any(one.startswith(held) for one in stops)


@given(TEXT, STOPS)
def test_with_the_stop_string_included_nothing_is_held_back(text: str, stops: list[str]) -> None:
    search = StopStrings(stops, is_included=True)
    for character in text:
        delta, stop = search.push(character)
        assert delta == character
        if stop is not None:
            return


@given(TEXT, TEXT, STOPS, st.booleans())
def test_no_match_ends_in_an_exempt_text(first: str, second: str, stops: list[str], is_included: bool) -> None:
    search = StopStrings(stops, is_included=is_included)
    before, stop = search.push(first, is_exempt=True)
    assert stop is None
    after, stop = search.push(second)
    whole = first + second
    matches = [
        (start + len(one), start, one)
        for one in stops
        for start in range(len(whole))
        if whole.startswith(one, start) and start + len(one) > len(first)
    ]
    if not matches:
        assert (before + after + search.flush(), stop) == (whole, None)
        return
    end, start, expected = min(matches)
    assert (before + after, stop) == (whole[: end if is_included else start], expected)


def test_without_stop_strings_text_goes_through() -> None:
    search = StopStrings([], is_included=False)
    assert search.push("abc") == ("abc", None)
    assert search.flush() == ""
    assert StopStrings([""], is_included=False).push("abc") == ("abc", None)
