"""Models that take text only, and a tensor for each sampling parameter: Python models, and those of TensorRT-LLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.mock_llm import user
from support.serving import RunningServer, running_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# TensorRT-LLM's ensemble: what must be given is not optional there.
TENSORS = {
    "text_input": ("STRING", False),
    "max_tokens": ("INT32", False),
    "stream": ("BOOL", False),
    "stop_words": ("STRING", True),
    "bad_words": ("STRING", True),
    "temperature": ("FP32", True),
    "top_k": ("INT32", True),
    "top_p": ("FP32", True),
    "seed": ("UINT64", True),
    "min_length": ("INT32", True),
    "frequency_penalty": ("FP32", True),
    "guided_decoding_guide_type": ("STRING", True),
    "guided_decoding_guide": ("STRING", True),
    "return_log_probs": ("BOOL", False),
    "suffix": ("STRING", True),
}
# Answers with its input, in pieces when it streams.
SOURCE = """
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = {}
            for tensor in request.inputs():
                values = tensor.as_numpy().reshape(-1).tolist()
                values = [value.decode() if isinstance(value, bytes) else value for value in values]
                given[tensor.name()] = [round(value, 4) if isinstance(value, float) else value for value in values]
            sender = request.get_response_sender()
            text = json.dumps(given)
            half = len(text) // 2 if given["stream"][0] else 0
            for piece in (text[:half], text[half:]):
                if piece:
                    import numpy as np

                    output = pb_utils.Tensor("text_output", np.array([piece.encode()], np.object_))
                    sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_text_model(
    root: Path, name: str, *, files: dict[str, str], max_batch_size: int = 0, **parameters: str
) -> None:
    lines = [
        'backend: "python"',
        f"max_batch_size: {max_batch_size}",
        "model_transaction_policy { decoupled: true }",
        'output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }',
    ]
    for tensor, (kind, is_optional) in TENSORS.items():
        size = -1 if tensor.endswith("words") else 1
        lines.append(
            f'input {{ name: "{tensor}" data_type: TYPE_{kind} dims: [ {size} ] optional: {str(is_optional).lower()} }}'
        )
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}')
    directory = root / name
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text("\n".join(lines) + "\n")
    (directory / "1" / "model.py").write_text(SOURCE)
    for path, text in files.items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    config = json.dumps({"chat_template": CHATML, "eos_token": "</s>"})
    write_text_model(root, "bare", files={})
    write_text_model(root, "beside", files={"1/chat_template.jinja": CHATML}, max_batch_size=4)
    write_text_model(root, "config", files={"tokenizer_config.json": config})
    write_text_model(root, "tokenizer", files={"hf/tokenizer_config.json": config}, tokenizer_dir="hf")
    write_text_model(root, "named", files={"chat.jinja": "{{ messages[0].content }}!"}, chat_template="chat.jinja")
    write_text_model(root, "inline", files={}, chat_template=CHATML, default_max_tokens="7")
    write_text_model(root, "lost", files={}, chat_template="nothing.jinja")
    write_text_model(root, "strict", files={}, chat_template="{{ raise_exception('no ' ~ messages[0].role) }}")
    with running_server(root) as running:
        yield running


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=20) as client:
        yield client


def report(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """What the model got."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    found: dict[str, Any] = json.loads(choice["message"]["content"] if path == CHAT else choice["text"])
    return found


@pytest.mark.parametrize("model", ["beside", "config", "tokenizer", "inline"])
def test_the_server_makes_the_prompt_by_the_model_s_template(http: httpx.Client, model: str) -> None:
    given = report(http, CHAT, model=model, messages=[{"role": "system", "content": "Be kind."}, *user("hi")])
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert given["text_input"] == [prompt]
    assert given["stream"] == [False]
    assert given["return_log_probs"] == [False]
    assert given["max_tokens"] == [7 if model == "inline" else 256]


def test_a_template_may_be_a_file_that_the_config_names(http: httpx.Client) -> None:
    assert report(http, CHAT, model="named", messages=user("hi"))["text_input"] == ["hi!"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_sampling_parameters_are_tensors(http: httpx.Client, path: str) -> None:
    prompt = {"messages": user("hi")} if path == CHAT else {"prompt": "hi"}
    wishes = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 2**63 - 1, "min_tokens": 2, "stop": ["a", "b"]}
    given = report(http, path, model="beside", max_tokens=5, bad_words=["c"], frequency_penalty=1, **prompt, **wishes)
    expected = {"temperature": [0.5], "top_p": [0.25], "top_k": [3], "seed": [2**63 - 1], "min_length": [2]}
    assert expected.items() <= given.items()
    assert (given["max_tokens"], given["stop_words"], given["bad_words"]) == ([5], ["a", "b"], ["c"])
    assert given["frequency_penalty"] == [1.0]


def test_a_model_may_fill_in_the_middle(http: httpx.Client) -> None:
    assert report(http, COMPLETIONS, model="bare", prompt="a = ", suffix="\nprint(a)")["suffix"] == ["\nprint(a)"]
    assert "suffix" not in report(http, COMPLETIONS, model="bare", prompt="a = ", suffix="")


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        ({"guided_json": {"type": "object"}}, ("json_schema", '{"type":"object"}')),
        ({"response_format": {"type": "json_object"}}, ("json", "")),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"grammar": "root ::= x"}, ("ebnf_grammar", "root ::= x")),
    ],
)
def test_constraints_are_guides(http: httpx.Client, structure: dict[str, Any], expected: tuple[str, str]) -> None:
    given = report(http, CHAT, model="beside", messages=user("hi"), **structure)
    assert (given["guided_decoding_guide_type"], given["guided_decoding_guide"]) == ([expected[0]], [expected[1]])


def test_a_stream_is_asked_for(served: RunningServer) -> None:
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(model="beside", messages=user("hi"), stream=True))  # type: ignore[arg-type]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(texts) == 2
    assert json.loads("".join(texts))["stream"] == [True]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"model": "bare"}, 400, "messages", "put chat_template.jinja or tokenizer_config.json into its directory"),
        ({"model": "lost"}, 404, None, "names 'nothing.jinja', which is neither a template nor a file"),
        ({"model": "strict"}, 400, "messages", "no user"),
        ({"model": "beside", "min_p": 0.5}, 400, "min_p", "none for 'min_p'"),
        ({"model": "beside", "guided_choice": ["a"]}, 400, "structured_outputs", "none for 'structured_outputs'"),
        ({"model": "beside", "seed": -1}, 400, "seed", "UINT64, which -1 does not fit"),
        ({"model": "beside", "max_tokens": 2**40}, 400, "max_tokens", "INT32"),
    ],
)
def test_what_cannot_be_done_is_said(
    http: httpx.Client, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    answer = http.post(CHAT, json={"messages": user("hi"), **body})
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
