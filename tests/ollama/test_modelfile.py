"""Models with a Modelfile behind a whole server: every API speaks to them as the file says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gguf_models import write_gguf
from support.serving import running_server
from support.tiny_checkpoints import write_checkpoint

AGENT = """\
FROM ./tiny.gguf
PARAMETER num_ctx 60
PARAMETER num_predict 3
PARAMETER temperature 0
PARAMETER stop "<end>"
PARAMETER stop "<stop>"
SYSTEM Be brief.
MESSAGE user one
MESSAGE assistant two
LICENSE Free
TEMPLATE \"\"\"{{ range .Messages }}<{{ .Role }}>{{ .Content }}
{{ end }}{{ .Tools }}\"\"\"
"""
CODER = (
    'FROM ./tiny.gguf\nTEMPLATE """{{ if .Suffix }}P{{ .Prompt }}S{{ .Suffix }}M{{ else }}{{ .Prompt }}{{ end }}"""\n'
)
PROMPT = "<system>Be brief.\n<user>one\n<assistant>two\n<user>three\n[]"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("modelfiles")
    weights = write_gguf(write_checkpoint(root / "source"), root / "tiny.gguf")
    for name, text in (("agent", AGENT), ("coder", CODER)):
        directory = root / "models" / name / "1"
        directory.mkdir(parents=True)
        (directory / "Modelfile").write_text(text)
        (directory / "tiny.gguf").symlink_to(weights)
    (root / "Modelfile.given").write_text(f"FROM {weights}\nTEMPLATE {{{{ .Prompt }}}}!\n")
    with (
        running_server((root / "models", root / "Modelfile.given")) as running,
        httpx.Client(base_url=f"http://{running.http_url}", timeout=30) as client,
    ):
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"stream": False, **body})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def num_tokens(http: httpx.Client, model: str, text: str) -> int:
    """Of a prompt that is this text."""
    count: int = post(http, "/api/generate", model=model, prompt=text, raw=True)["prompt_eval_count"]
    return count


def test_the_template_system_message_and_history_are_those_of_the_file(http: httpx.Client) -> None:
    expected = num_tokens(http, "agent", PROMPT)
    messages = [{"role": "user", "content": "three"}]
    chat = post(http, "/api/chat", model="agent", messages=messages)
    openai = post(http, "/v1/chat/completions", model="agent", messages=messages)
    generated = post(http, "/api/generate", model="agent", prompt="three")
    assert chat["prompt_eval_count"] == openai["usage"]["prompt_tokens"] == generated["prompt_eval_count"] == expected
    assert chat["message"]["content"] == openai["choices"][0]["message"]["content"] == generated["response"]


def test_parameters_are_the_defaults_of_requests(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "three"}]
    assert post(http, "/api/chat", model="agent", messages=messages)["eval_count"] == 3
    assert post(http, "/v1/chat/completions", model="agent", messages=messages)["usage"]["completion_tokens"] == 3
    options = {"num_predict": 2}
    assert post(http, "/api/chat", model="agent", messages=messages, options=options)["eval_count"] == 2
    refused = http.post("/api/generate", json={"model": "agent", "prompt": "word " * 80, "raw": True})
    assert refused.status_code == 400
    assert "60" in refused.json()["error"]


def test_show_tells_the_file(http: httpx.Client) -> None:
    shown = post(http, "/api/show", model="agent")
    assert shown["modelfile"].startswith(
        "# To build on this model, let FROM be:\n# FROM agent:latest\n\nFROM ./tiny.gguf\n"
    )
    assert "MESSAGE assistant two\n" in shown["modelfile"]
    assert shown["parameters"].splitlines() == [
        "num_ctx                        60",
        "num_predict                    3",
        "temperature                    0.0",
        'stop                           "<end>"',
        'stop                           "<stop>"',
    ]
    assert (shown["system"], shown["license"]) == ("Be brief.", "Free")
    assert shown["template"].startswith("{{ range .Messages }}")
    assert shown["messages"][1] == {"role": "assistant", "content": "two"}
    assert (shown["details"]["format"], shown["model_info"]["llama.context_length"]) == ("gguf", 60)
    assert post(http, "/api/show", model="coder")["capabilities"] == ["completion", "insert"]


def test_a_suffix_goes_into_the_template(http: httpx.Client) -> None:
    filled = post(http, "/api/generate", model="coder", prompt="def f():", suffix="return", options={"num_predict": 1})
    assert filled["prompt_eval_count"] == num_tokens(http, "coder", "Pdef f():SreturnM")


def test_a_request_may_have_a_template(http: httpx.Client) -> None:
    template = "{{ .System }}|{{ .Prompt }}|"
    options = {"num_predict": 1}
    body = {"model": "coder", "prompt": "one", "system": "x", "template": template, "options": options}
    assert post(http, "/api/generate", **body)["prompt_eval_count"] == num_tokens(http, "coder", "x|one|")


def test_a_modelfile_on_the_command_line(http: httpx.Client) -> None:
    told = post(
        http, "/api/chat", model="given", messages=[{"role": "user", "content": "a"}], options={"num_predict": 1}
    )
    assert told["prompt_eval_count"] == num_tokens(http, "given", "a!")
    assert post(http, "/api/show", model="given")["template"] == "{{ .Prompt }}!"


def test_wrong_uses_of_a_template(http: httpx.Client) -> None:
    for body, message in (
        ({"raw": True, "template": "x"}, "raw mode does not support template, system, or context"),
        ({"template": "{{ .Foo.Bar }}"}, "line 1, column 4: nil pointer evaluating .Bar"),
    ):
        refused = http.post("/api/generate", json={"model": "coder", "prompt": "one", **body})
        assert (refused.status_code, message in refused.json()["error"]) == (400, True), refused.text
