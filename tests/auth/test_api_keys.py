"""Files of API keys: what is read, what is refused without telling secrets, and what happens when they change."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.keys import KeyFile

from modelserver.auth.api_keys import LOOK_S, KeyRing, Scope, create_key, date_text, open_keys, parse_scopes, read_keys
from modelserver.errors import InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from modelserver.telemetry.file_reloads import FileReloads
from tests.support.metrics_pages import render_text

GOOD = f"{{name: a, id: '00000001', hash: 'sha256:{'0' * 32}:{'0' * 64}', scopes: [infer]}}"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.yaml")


def test_a_key_is_found_by_both_headers_and_nothing_else(keys: KeyFile) -> None:
    text = keys.add("ci", Scope.INFER)
    ring = KeyRing(str(keys.path))
    for headers in (
        {"authorization": f"Bearer {text}"},
        {"authorization": f"bearer  {text} "},
        {"x-api-key": text},
        {"x-api-key": text.encode()},
        {"authorization": "Basic dTpw", "x-api-key": text},
    ):
        assert ring.caller(headers).name == "ci"
    for headers in (
        {},
        {"authorization": text},
        {"authorization": f"Basic {text}"},
        {"x-api-key": ""},
        {"x-api-key": text[:-1]},
        {"x-api-key": text + "A"},
        {"x-api-key": text[:-1] + ("A" if text[-1] != "A" else "B")},
        {"x-api-key": "msk_00000000" + text[12:]},
        {"x-api-key": text + "\n"[:0] + "\u00e9"},
        {"x-api-key": "msk_" + "\u0661" * 8 + text[12:]},
        {"authorization": "Bearer wrong", "x-api-key": text},
    ):
        with pytest.raises(UnauthenticatedError):
            ring.caller(headers)


def test_the_file_has_no_key_and_each_has_its_own_salt(keys: KeyFile) -> None:
    texts = [keys.add(name, Scope.INFER) for name in ("a", "b")]
    content = keys.path.read_text()
    assert all(text not in content and text[13:] not in content for text in texts)
    salts = {key.salt for key in read_keys(keys.path).values()}
    assert len(salts) == 2


def test_scopes_and_models() -> None:
    _, key = create_key("x", frozenset({Scope.INFER}), ("res*", "bert?"))
    assert [key.allows_model(name) for name in ("resnet", "res", "bert1", "bert", "Resnet", "other")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    key.check_scope(Scope.INFER)
    for scope in (Scope.METRICS, Scope.ADMIN):
        with pytest.raises(PermissionDeniedError, match=f"'x' has no scope '{scope.value}'"):
            key.check_scope(scope)
    assert create_key("y", frozenset({Scope.ADMIN}))[1].allows_model("anything")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: b", "must be a list"),
        ("- [", "line 1 is not YAML"),
        ("- !!python/object:os.system {}", "line 1 is not YAML"),
        (
            f"- {GOOD}\n- {{name: b,\n  id: '00000002', secret-text: 1,\n  secret-text: 2}}",
            "line 4: a field is there twice",
        ),
        ("- secret-text", "entry 1: expected name"),
        (f"- {GOOD}\n- {GOOD}", "entry 2: its name or id is there twice"),
        ("- {name: a, id: '00000001', hash: secret-text, scopes: [infer]}", "'hash' must be sha256"),
        ("- {name: a, id: 7, hash: x, scopes: [infer]}", "'id' must be"),
        ("- {name: 7}", "'name' must be a string"),
        ("- {name: 'secret-text \\n'}", "the name of an API key"),
        (f"- {GOOD.replace('[infer]', '[infr]')}", "got 'infr'; did you mean 'infer'?"),
        (f"- {GOOD.replace('[infer]', '[]')}", "got none"),
        (f"- {GOOD.replace('[infer]', 'infer')}", "must be lists of strings"),
        (f"- {GOOD.replace('scopes', 'models: [], scopes')}", "'models' is empty"),
        (f"- {GOOD.replace('scopes', 'secret-text: 1, scopes')}", "an entry has only the fields"),
    ],
)
def test_a_bad_file_is_refused_without_a_word_of_its_secrets(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError) as error:
        KeyRing(str(path))
    assert words in error.value.message
    assert "--api-keys-file" in error.value.message
    assert "secret-text" not in error.value.message


def test_removing_the_first_line_of_an_entry_does_not_merge_it_with_the_one_before(tmp_path: Path) -> None:
    """The fields that are left would replace those of the entry before, and the key would go on."""
    lines = [line for name in ("stays", "goes") for line in _entry(name)]
    path = tmp_path / "keys.yaml"
    path.write_text("\n".join(lines))
    assert len(read_keys(path)) == 2
    del lines[4]
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidArgumentError, match="line 5: a field is there twice, first in line 2"):
        read_keys(path)


def _entry(name: str) -> list[str]:
    _, key = create_key(name, frozenset({Scope.INFER}))
    hashed = f"sha256:{key.salt.hex()}:{key.digest.hex()}"
    return [f"- name: {name}", f"  id: '{key.id}'", f"  hash: {hashed}", "  scopes: [infer]"]


def test_a_missing_file_keeps_the_server_from_starting_and_an_empty_one_lets_nobody_in(tmp_path: Path) -> None:
    assert open_keys("") is None
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        open_keys(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(UnauthenticatedError):
        KeyRing(str(tmp_path / "empty")).caller({"x-api-key": "msk_"})


def test_changes_are_taken_at_the_next_look_and_broken_files_are_not(
    keys: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    first = keys.add("first", Scope.INFER)
    reloads = FileReloads()
    ring = KeyRing(str(keys.path), reloads, clock=clock)
    before = ring.caller({"x-api-key": first})

    second = keys.add("second", Scope.INFER)
    with pytest.raises(UnauthenticatedError):
        ring.caller({"x-api-key": second})
    clock.now_s += LOOK_S
    assert ring.caller({"x-api-key": second}).name == "second"
    ring.check_current(before)  # an entry that stays is the same

    for broken in ("- [", None):
        if broken is None:
            keys.path.unlink()
        else:
            keys.write(broken)
        caplog.clear()
        clock.now_s += LOOK_S
        with caplog.at_level(logging.ERROR):
            assert ring.caller({"x-api-key": second}).name == "second"
            clock.now_s += LOOK_S
            assert ring.caller({"x-api-key": first}) is before
        assert len(caplog.records) == 1, "a broken file is told once"
    told = render_text(reloads.families()).decode()
    assert 'modelserver_reload_failures_total{flag="--api-keys-file"} 2' in told
    assert 'modelserver_last_reload_successful{flag="--api-keys-file"} 0' in told

    keys.remove("first")
    clock.now_s += LOOK_S
    with pytest.raises(UnauthenticatedError):
        ring.check_current(before)
    assert 'modelserver_last_reload_successful{flag="--api-keys-file"} 1' in render_text(reloads.families()).decode()
    with pytest.raises(UnauthenticatedError):
        ring.caller({"x-api-key": first})
    assert ring.caller({"x-api-key": second}).name == "second"


def test_scopes_by_name() -> None:
    assert parse_scopes(["admin", "infer"]) == {Scope.ADMIN, Scope.INFER}
    with pytest.raises(InvalidArgumentError, match="'metric'; did you mean 'metrics'"):
        parse_scopes(["metric"])


@pytest.mark.parametrize(
    ("text", "expires_s"),
    [
        ("2026-12-31", 1798761600.0),
        ("2026-12-31T12:00:00Z", 1798718400.0),
        ("2026-12-31T13:00:00+01:00", 1798718400.0),
    ],
)
def test_a_key_expires(tmp_path: Path, text: str, expires_s: float) -> None:
    """A day ends with it, in UTC. Streams that are open end with their key."""
    given, key = create_key("ci", frozenset({Scope.INFER}))
    path = tmp_path / "keys.yaml"
    path.write_text(key.line + f"  expires: {text}\n")
    now_s = [expires_s - 1]
    ring = KeyRing(str(path), today_s=lambda: now_s[0])
    caller = ring.caller({"x-api-key": given})
    assert caller.expires_s == expires_s
    ring.check_current(caller)
    assert f"expires: '{date_text(expires_s)}'" in caller.line
    now_s[0] = expires_s
    with pytest.raises(UnauthenticatedError, match="expired"):
        ring.caller({"x-api-key": given})
    with pytest.raises(UnauthenticatedError, match="expired"):
        ring.check_current(caller)


@pytest.mark.parametrize("text", ["tomorrow", "2026-12-31T12:00:00", "7", "[]"])
def test_a_key_expires_at_a_time_that_all_understand(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {GOOD.replace('scopes', f'expires: {text}, scopes')}")
    with pytest.raises(InvalidArgumentError, match="entry 1: 'expires': a key expires at a day such as"):
        KeyRing(str(path))
