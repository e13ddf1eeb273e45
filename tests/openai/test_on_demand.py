"""Language models on demand: OpenAI's clients wait for the first answer a little longer."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from support.llm_models import write_llm
from support.mock_llm import write_mock_llm
from support.serving import RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("lazy")
    for name in ("chat", "stream", "completion"):
        write_mock_llm(root, name)
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    write_llm(root, "tiny", checkpoint, max_model_len=64, instance_in_process="true")
    with running_server(root, load_on_demand=True, caller_limits="tokens_per_second=1000000") as running:
        yield running


def is_loaded(server: RunningServer, name: str) -> bool:
    return server.call(lambda: any(model.name == name for model in server.server.repository.models()))


def test_the_first_call_loads_the_model(lazy: RunningServer) -> None:
    with openai.OpenAI(base_url=f"http://{lazy.http_url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "hello there"}]
        assert [model.id for model in client.models.list()] == ["chat", "completion", "stream", "tiny"]
        assert client.models.retrieve("chat").id == "chat"
        assert not is_loaded(lazy, "chat")
        answer = client.chat.completions.create(model="chat", messages=messages)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "hello there"
        chunks = client.chat.completions.create(model="stream", messages=messages, stream=True)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello there"
        assert client.completions.create(model="completion", prompt="one two").choices[0].text.strip()
        with pytest.raises(openai.NotFoundError, match="are: chat, completion, stream, tiny") as unknown:
            client.completions.create(model="none", prompt="one")
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    # A quota of tokens counts what the models have read and written, whoever asked.
    counts = lazy.call(lambda: lazy.server.callers.counts.families()[1].samples)
    assert sum(sample.value for sample in counts) >= 8


def test_an_unloaded_model_is_refused_before_it_is_loaded(lazy: RunningServer) -> None:
    with openai.OpenAI(base_url=f"http://{lazy.http_url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("tiny").model_extra["max_model_len"] == 64  # type: ignore[index]
        with pytest.raises(openai.NotFoundError, match="are: chat, completion, stream, tiny") as unknown:
            client.models.retrieve("none")
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
        assert not is_loaded(lazy, "tiny")
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens  # type: ignore[union-attr]
        assert is_loaded(lazy, "tiny")
        assert [model.id for model in client.models.list()] == ["chat", "completion", "stream", "tiny"]
