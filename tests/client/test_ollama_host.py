"""OLLAMA_HOST is the address of commands, in the forms that Ollama takes, where nothing of ours names another."""

from __future__ import annotations

import pytest

from modelserver.client.address import usual_url
from modelserver.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("gpu", "http://gpu:11434"),
        ("gpu:8080", "http://gpu:8080"),
        (":8080", "http://127.0.0.1:8080"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("[::]:8080", "http://[::1]:8080"),
        ("http://gpu", "http://gpu:80"),
        ("https://gpu/", "https://gpu:443"),
        ("https://gpu:8443/ollama", "https://gpu:8443"),
    ],
)
def test_forms(monkeypatch: pytest.MonkeyPatch, host: str, url: str) -> None:
    monkeypatch.delenv("MODELSERVER_URL", raising=False)
    monkeypatch.setenv("OLLAMA_HOST", host)
    assert usual_url(host) == url
    assert usual_url("http://given:1") == "http://given:1"
    monkeypatch.setenv("MODELSERVER_URL", host)
    assert usual_url(host) == host


def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "gpu:port")
    with pytest.raises(InvalidArgumentError, match="OLLAMA_HOST expects"):
        usual_url("gpu:port")
