"""Backends over vLLM and TensorRT-LLM as Triton's images have them: model.py files below a `--backend-directory`.

The packages are stand-ins (`support/engine_packages`), and so are the files, which make the same calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.serving import RunningServer, running_server
from support.waiting import until_true

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    files = {
        "echo/config.pbtxt": 'backend: "vllm"\n'
        'parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }\n'
        'parameters { key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "true" } }\n',
        "echo/1/model.json": '{"model": "any", "enable_lora": true, "max_model_len": 100}',
        "echo/1/multi_lora.json": '{"backwards": "/adapters/backwards"}',
        "broken/config.pbtxt": 'backend: "vllm"',
        "broken/1/model.json": '{"model": "broken"}',
        "plain/config.pbtxt": 'backend: "trtllm"\n'
        'input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] }, '
        '{ name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true }, '
        '{ name: "sampling_param_max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]\n'
        'output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]\n',
        "plain/1/model.yaml": "model: any\ntriton_config:\n  max_batch_size: 0\n  decoupled: True\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT / "engine_packages"))
        with running_server(
            root, backend_directory=(str(SUPPORT / "engine_backends"),), strict_readiness=False
        ) as running:
            yield running


def _generate(server: RunningServer, model: str, **fields: object) -> httpx.Response:
    return httpx.post(f"http://{server.http_url}/v2/models/{model}/generate", json=fields)


def test_a_backend_called_as_its_library_generates(server: RunningServer) -> None:
    parameters = json.dumps({"max_tokens": 8})
    answer = _generate(server, "echo", text_input="hello ", sampling_parameters=parameters, return_finish_reason=True)
    assert answer.json()["text_output"] == "hello he"
    assert answer.json()["finish_reason"] == "length"
    assert (
        _generate(server, "plain", text_input="hello ", sampling_param_max_tokens=7).json()["text_output"] == "hello h"
    )


def test_adapters_have_their_names(server: RunningServer) -> None:
    for name, expected in (("backwards", " olleh"), ("forwards", "LoRA forwards is not supported")):
        parameters = json.dumps({"max_tokens": 6, "lora_name": name})
        answer = _generate(server, "echo", text_input="hello ", sampling_parameters=parameters)
        assert expected in answer.text


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        ("echo", {"stream": True, "sampling_parameters": '{"max_tokens": 5000}'}, "aborted"),
        ("plain", {"streaming": True, "sampling_param_max_tokens": 5000}, "aborted a request"),
    ],
)
def test_a_client_that_leaves_a_stream_ends_it(
    server: RunningServer, caplog: pytest.LogCaptureFixture, model: str, fields: dict[str, object], told: str
) -> None:
    url = f"http://{server.http_url}/v2/models/{model}/generate_stream"
    with caplog.at_level("INFO"), httpx.stream("POST", url, json={"text_input": "hello ", **fields}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert json.loads(next(lines).removeprefix("data: "))["text_output"] == "h"
        answer.close()
        until_true(lambda: any(told in record.getMessage() for record in caplog.records), told)


def test_a_wrong_parameter_is_an_error_of_its_request(server: RunningServer) -> None:
    answer = _generate(server, "echo", text_input="a", sampling_parameters='{"beams": 3}')
    assert answer.status_code >= 400
    assert "beams" in answer.text


def test_an_engine_that_does_not_start_says_why(server: RunningServer) -> None:
    answer = _generate(server, "broken", text_input="a")
    assert "no such weights" in answer.text


def test_its_metrics_are_on_the_page(server: RunningServer) -> None:
    _generate(server, "echo", text_input="ab", sampling_parameters='{"max_tokens": 2}')

    def page() -> str:
        return httpx.get(f"http://{server.metrics_url}/metrics").text

    assert 'vllm:generation_tokens_total{model="echo",version="1"}' in page()
    until_true(lambda: 'vllm:request_prompt_tokens_count{model="echo",version="1"}' in page(), "the histogram")
