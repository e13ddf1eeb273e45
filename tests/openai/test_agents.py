"""Clients beyond OpenAI's own of Python, where they are installed: that of JavaScript, and the SDK of agents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.client_programs import run_node
from support.mock_llm import say
from support.serving import RunningServer


@pytest.mark.tool("node", "openai-js")
def test_the_client_of_javascript_finds_all_that_it_asks_for(llm_server: RunningServer) -> None:
    assert run_node("openai-js", "openai_js.js", llm_server.http_url) == {
        "chat": "one two three",
        "stream": "one two three",
        "tools": ["I look.", "weather", '{"city": "Oslo"}', "tool_calls"],
        "run": "12 in Oslo",
        "response": [["reasoning", "message", "function_call"], '{"city": "Oslo"}'],
        "follows": "x",
        "completion": "one",
        "embedding": 4,
        "models": True,
        "absent": [404, "model_not_found", True],
        "files": [400, True],
    }


@pytest.mark.tool("agents")
@pytest.mark.parametrize("is_chained", [False, True])
async def test_an_agent_holds_a_session_of_many_turns(llm_server: RunningServer, is_chained: bool) -> None:
    """Each turn reasons, calls a tool and tells its result; the history is the client's, or the server's."""
    import agents
    import openai

    agents.set_tracing_disabled(disabled=True)
    asked: list[str] = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"12 degrees in {city}"

    cities = ["Oslo", "Rome", "Bern"]
    async with openai.AsyncOpenAI(base_url=f"http://{llm_server.http_url}/v1", api_key="none") as client:
        model = agents.OpenAIResponsesModel("agent", client)
        agent = agents.Agent(name="guide", instructions="Help.", model=model, tools=[weather])
        more: dict[str, Any] = {} if is_chained else {"session": agents.SQLiteSession("guide")}
        for city in cities:
            call = json.dumps({"name": "weather", "arguments": {"city": city}})
            prompt = say(text=f"<think>Hm.</think>I look.\n<tool_call>\n{call}\n</tool_call>")
            result = await agents.Runner.run(agent, prompt, **more)
            assert result.final_output == f"12 degrees in {city}"
            streamed = agents.Runner.run_streamed(agent, "one two", **more)
            deltas = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
            assert "".join(each.delta for each in deltas if each.type == "response.output_text.delta") == "one two"
            if is_chained:
                more = {"previous_response_id": streamed.last_response_id}
    assert asked == cities
