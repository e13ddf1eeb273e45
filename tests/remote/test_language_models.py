"""Language models behind OpenAI's and Anthropic's API: chats, tools, reasoning, counts and faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import openai
import pytest
from support.asking import ask
from support.mock_llm import write_mock_llm
from support.remote_models import write_remote
from support.serving import RunningServer, running_server

Script = Callable[["Provider", dict[str, Any]], None]


class Provider(BaseHTTPRequestHandler):
    """A provider that answers as the model's name says: a script of this module."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, dict[str, str], dict[str, Any]]]] = []

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.seen.append((self.path, headers, document))
        SCRIPTS[document["model"]](self, document)

    def start(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, document: Any) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def refuse(self, status: int, message: str, **headers: str) -> None:
        self.start(status, **headers)
        self.wfile.write(json.dumps({"error": {"message": message}}).encode())


def _delta(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


def talks(to: Provider, _: dict[str, Any]) -> None:
    to.start()
    to.event(_delta(role="assistant", content=""))
    to.event(_delta(reasoning_content="Let me "))
    to.event(_delta(reasoning_content="think."))
    for word in ("Hello", ", ", "world"):
        to.event(_delta(content=word))
    to.event(_delta("length"))
    to.event({"choices": [], "usage": USAGE})
    to.event("[DONE]")


def calls(to: Provider, _: dict[str, Any]) -> None:
    to.start()
    for index, (name, arguments) in enumerate((("add", ['{"a": 1,', ' "b": 2}']), ("now", [""]))):
        head = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        to.event(_delta(tool_calls=[head]))
        for piece in arguments:
            to.event(_delta(tool_calls=[{"index": index, "function": {"arguments": piece}}]))
    to.event(_delta("tool_calls"))
    to.event("[DONE]")


def breaks(to: Provider, _: dict[str, Any]) -> None:
    to.start()
    to.event(_delta(content="half"))


def says_an_error(to: Provider, _: dict[str, Any]) -> None:
    to.start()
    to.event(_delta(content="half"))
    to.event({"error": {"message": "the engine died"}})


def says_no_json(to: Provider, _: dict[str, Any]) -> None:
    to.start()
    to.event("{oops")


def speaks(to: Provider, document: dict[str, Any]) -> None:
    """As Anthropic."""
    to.start()
    usage = {"input_tokens": 3, "cache_read_input_tokens": 6, "output_tokens": 1}
    to.event({"type": "message_start", "message": {"usage": usage}})
    to.event({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}})
    to.event({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}})
    to.event({"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}})
    to.event({"type": "ping"})
    to.event({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Good day"}})
    reason = "end_turn"
    if "tools" in document:
        reason = "tool_use"
        block = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
        to.event({"type": "content_block_start", "index": 2, "content_block": block})
        for piece in ('{"a": 1, ', '"b": 2}'):
            to.event({"type": "content_block_delta", "index": 2, "delta": {"partial_json": piece}})
    to.event({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 7}})
    to.event({"type": "message_stop"})


SCRIPTS: dict[str, Script] = {
    "talks": talks,
    "calls": calls,
    "breaks": breaks,
    "says_an_error": says_an_error,
    "says_no_json": says_no_json,
    "is_busy": lambda to, _: to.refuse(429, "slow down", Retry_After="7"),
    "is_down": lambda to, _: to.refuse(503, "overloaded"),
    "has_no_key": lambda to, _: to.refuse(401, "wrong key"),
    "is_small": lambda to, _: to.refuse(400, "maximum context length is 8 tokens"),
    "speaks": speaks,
}


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def llm_back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("llm_back")
    write_mock_llm(repository, "mock")
    with running_server(repository) as running:
        yield running


@pytest.fixture(scope="module")
def front(provider: str, llm_back: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("llm_front")
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text("sk-test\n")
    for model in SCRIPTS:
        scheme = "anthropic+http" if model == "speaks" else "openai+http"
        base = "" if model == "speaks" else "/v1"
        write_remote(repository, model, f"{scheme}://{provider}{base}", api_key_file=key, retries=0)
    write_remote(repository, "saved", f"openai+http://{provider}/v1", remote_model="is_small", fallback="talks")
    write_remote(repository, "by_openai", f"openai+http://{llm_back.http_url}/v1", remote_model="mock")
    write_remote(repository, "by_anthropic", f"anthropic+http://{llm_back.http_url}", remote_model="mock")
    write_remote(repository, "by_grpc", f"grpc://{llm_back.grpc_url}", remote_model="mock")
    with running_server(repository) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{front.http_url}/v1", api_key="none", max_retries=0) as made:
        yield made


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    for name in ("add", "now")
]
HELLO: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_is_answered_with_reasoning_reason_and_counts(client: openai.OpenAI, is_streamed: bool) -> None:
    fields: Any = {"model": "talks", "messages": HELLO, "temperature": 0.5, "max_tokens": 9, "stop": ["!"]}
    if not is_streamed:
        answer = client.chat.completions.create(**fields)
        message, reason, usage = answer.choices[0].message, answer.choices[0].finish_reason, answer.usage
        text, thought = message.content, getattr(message, "reasoning_content", None) or message.reasoning
    else:
        chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        text = "".join(delta.content or "" for delta in deltas)
        thought = "".join(
            getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None) or "" for delta in deltas
        )
        reason = next(chunk.choices[0].finish_reason for chunk in reversed(chunks) if chunk.choices)
        usage = chunks[-1].usage
        assert len([delta for delta in deltas if delta.content]) >= 3, "pieces come as they are"
    assert (text, thought, reason) == ("Hello, world", "Let me think.", "length")
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (11, 5)
    path, headers, sent = Provider.seen[-1]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer sk-test"
    assert headers["x-modelserver-hops"] == "1"
    assert [message["content"] for message in sent["messages"]] == ["Be kind.", "Hello"]
    assert (sent["temperature"], sent["max_tokens"], sent["stop"]) == (0.5, 9, ["!"])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_are_called(client: openai.OpenAI, choice: Any, is_streamed: bool) -> None:
    fields: Any = {"model": "calls", "messages": HELLO, "tools": TOOLS, "tool_choice": choice}
    found: dict[int, list[str]] = {}
    if is_streamed:
        for chunk in client.chat.completions.create(**fields, stream=True):
            for call in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
                parts = found.setdefault(call.index, ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
    else:
        made = client.chat.completions.create(**fields).choices[0]
        assert made.finish_reason in ("tool_calls", "stop")
        found = {
            index: [call.function.name, call.function.arguments]
            for index, call in enumerate(made.message.tool_calls or ())
        }
    assert [(name, json.loads(arguments)) for name, arguments in found.values()] == [
        ("add", {"a": 1, "b": 2}),
        ("now", {}),
    ]
    sent = Provider.seen[-1][2]
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["add", "now"]
    assert sent.get("tool_choice") == (None if choice == "auto" else "required")
    assert "response_format" not in sent


def test_results_of_tools_and_schemas_are_sent_on(client: openai.OpenAI) -> None:
    call = {"id": "c9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c9", "content": "3"},
    ]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    client.chat.completions.create(
        model="talks",
        messages=messages,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    sent = Provider.seen[-1][2]
    (told,) = sent["messages"][2]["tool_calls"]
    assert (told["id"], json.loads(told["function"]["arguments"])) == ("c9", {"a": 1})
    assert sent["messages"][3] == {"role": "tool", "content": "3", "tool_call_id": "c9"}
    assert sent["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("is_busy", 429, "HTTP 429: slow down"),
        ("is_down", 503, "HTTP 503: overloaded"),
        ("has_no_key", 500, "HTTP 401: wrong key"),
        ("is_small", 400, "maximum context length"),
        ("breaks", 503, "the answer ended before its end"),
        ("says_an_error", 500, "the answer broke off: the engine died"),
        ("says_no_json", 500, "cannot read the answer"),
    ],
)
def test_faults_are_told_with_the_name_of_the_endpoint(
    client: openai.OpenAI, provider: str, model: str, status: int, message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as failed:
        client.chat.completions.create(model=model, messages=HELLO)
    assert failed.value.status_code == status
    assert provider in failed.value.message
    if model == "is_busy":
        with pytest.raises(openai.APIStatusError, match="asked for a pause") as paused:
            client.chat.completions.create(model=model, messages=HELLO)
        assert 1 <= int(paused.value.response.headers["retry-after"]) <= 7


def test_a_stream_that_breaks_off_ends_in_an_error(client: openai.OpenAI) -> None:
    texts = []
    with pytest.raises(openai.APIError, match="ended before its end"):  # noqa: PT012
        for chunk in client.chat.completions.create(model="breaks", messages=HELLO, stream=True):
            texts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    assert texts == ["half"]


def test_a_text_that_is_too_long_goes_to_the_fallback(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="saved", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world"


def test_anthropics_api_is_asked_in_its_form(client: openai.OpenAI, front: RunningServer) -> None:
    call = {"id": "c9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": "Sure", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c9", "content": "3"},
    ]
    answer = client.chat.completions.create(model="speaks", messages=messages, tools=TOOLS, stop="x")
    message = answer.choices[0].message
    assert message.content == "Good day"
    (made,) = message.tool_calls or ()
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1, "b": 2})  # type: ignore[union-attr]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 7)
    path, headers, sent = Provider.seen[-1]
    assert path == "/v1/messages"
    assert headers["x-api-key"] == "sk-test"
    assert "authorization" not in headers
    assert headers["anthropic-version"]
    assert sent["system"] == "Be kind."
    assert sent["stop_sequences"] == ["x"]
    assert sent["messages"][1]["content"][1] == {"type": "tool_use", "id": "c9", "name": "add", "input": {"a": 1}}
    assert sent["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "c9", "content": "3"}]
    import anthropic

    with anthropic.Anthropic(base_url=f"http://{front.http_url}", api_key="none", max_retries=0) as other:
        told = other.messages.create(model="speaks", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
    assert [block.text for block in told.content if block.type == "text"] == ["Good day"]


@pytest.mark.parametrize("model", ["by_openai", "by_anthropic", "by_grpc"])
def test_our_own_server_answers_for_a_model_here(client: openai.OpenAI, front: RunningServer, model: str) -> None:
    messages: Any = [{"role": "user", "content": "one two three"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=10)
    assert answer.choices[0].message.content == "one two three"
    chunks = list(client.chat.completions.create(model=model, messages=messages, max_tokens=10, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two three"
    document = {"model": model, "messages": messages, "stream": False}
    status, told = ask(front.http_url, "POST", "/api/chat", json.dumps(document).encode())
    assert (status, told["message"]["content"]) == (200, "one two three")


def test_a_client_that_leaves_ends_its_request_there(client: openai.OpenAI, front: RunningServer) -> None:
    script = "do: " + json.dumps({"text": "a b c", "endless": True})
    for model in ("by_openai", "by_grpc"):
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": script}], stream=True
        )
        next(iter(stream))
        stream.close()
    # The back's one instance answers others at once only if the endless requests have ended.
    answer = client.completions.create(model="by_openai", prompt="a b")
    assert "a b" in answer.choices[0].text
