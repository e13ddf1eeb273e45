"""`modelserver keys`: what it prints once, what the file has, and commands that send a key."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from support.model_files import write_identity
from support.serving import running_server

from modelserver.auth.api_keys import KeyRing, Scope
from modelserver.cli.main import main


def _run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == status, captured
    return captured.out + captured.err


def test_created_keys_work_and_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    first = _run(capsys, "keys", "create", "ci", "--scope", "infer", "--model", "res*", "--file", str(file))
    second = _run(capsys, "keys", "create", "ops", "--scope=metrics", "--scope=admin")
    with file.open("a") as stream:
        stream.write(second.split("line for the file: ")[1])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ring = KeyRing(str(file))
    for out, name, scopes, models in (
        (first, "ci", {Scope.INFER}, ("res*",)),
        (second, "ops", {Scope.METRICS, Scope.ADMIN}, ()),
    ):
        key = ring.caller({"x-api-key": out.splitlines()[0].removeprefix("key: ")})
        assert (key.name, key.scopes, key.models) == (name, scopes, models)
    rows = json.loads(_run(capsys, "keys", "list", str(file), "--json"))
    assert [(row["name"], row["scopes"], row["models"]) for row in rows] == [
        ("ci", ["infer"], ["res*"]),
        ("ops", ["admin", "metrics"], []),
    ]
    assert "admin, metrics" in _run(capsys, "keys", "list", str(file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.yaml"]


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    _run(capsys, "keys", "create", "ci", "--scope=infer", "--file", file)
    assert "already has a key named 'ci'" in _run(
        capsys, "keys", "create", "ci", "--scope=infer", "--file", file, status=1
    )
    assert "'infr'" in _run(capsys, "keys", "create", "x", "--scope=infr", status=1)
    assert "the name of an API key" in _run(capsys, "keys", "create", "a b", "--scope=infer", status=1)
    assert "cannot read" in _run(capsys, "keys", "list", file + "x", status=1)
    for expires, words in (
        ("2020-01-01", "in the future"),
        ("0d", "in the future"),
        (f"{10**9}d", "year 10000"),
        ("soon", "such as 90d"),
    ):
        options = ("--scope=infer", f"--expires={expires}", "--file", file)
        assert words in _run(capsys, "keys", "create", "late", *options, status=1)
    assert "late" not in _run(capsys, "keys", "list", file)


def test_commands_send_the_key_of_the_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_identity(tmp_path / "models", "echo")
    file = tmp_path / "keys.yaml"
    key = _run(capsys, "keys", "create", "ops", "--scope=infer", "--scope=admin", "--file", str(file))
    with running_server(tmp_path / "models", api_keys_file=str(file)) as served:
        url = f"--url=http://{served.http_url}"
        _run(capsys, "health", url)
        assert "an API key is needed" in _run(capsys, "list", url, status=1)
        monkeypatch.setenv("MODELSERVER_API_KEY", key.splitlines()[0].removeprefix("key: "))
        assert "echo" in _run(capsys, "list", url)


def test_the_effective_options_have_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    out = _run(capsys, "serve", "--print-config", "--http-restricted-api=metadata:admin-key=s=ecret")
    assert "metadata:admin-key=***" in out
    assert "ecret" not in out
