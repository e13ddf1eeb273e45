"""Language models by the contract of Triton's vLLM backend: in one answer, in streams, and when clients leave."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.clients import ClientError, GrpcClient, HttpClient, ProtocolClient
from support.events import EventCall, events
from support.grpc_stream import StreamPeer
from support.llm_models import (
    ENDLESS,
    arrays,
    first_text,
    numbers_of,
    stream_request,
    write_endless_checkpoint,
    write_llm,
)
from support.serving import RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint
from support.waiting import until_true

from modelserver.errors import ErrorCode
from modelserver.telemetry.statistics_snapshot import FailureReason

PROMPT = "the model of a server"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
FOREVER = {"temperature": 0, "max_tokens": ENDLESS, "ignore_eos": True}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [write_endless_checkpoint(root / "0", seed=0), write_checkpoint(root / "1", seed=1)]


@pytest.fixture(scope="module")
def served(layout: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`one` is named by its model.json; `two` is a bare checkpoint, without a config.pbtxt; `brief` and `single`, which
    computes one sequence at a time, come and go.

    In one of the layouts engines have processes of their own: nothing else may be different.
    """
    root = tmp_path_factory.mktemp(f"llm-{layout}")
    place = {"instance_in_process": "true" if layout == "native-one-port" else "false", "num_threads": 1}
    write_llm(root, "one", checkpoints[0], kv_cache_memory_bytes=64 << 20, **place)
    write_llm(root, "brief", checkpoints[0], kv_cache_memory_bytes=8 << 20, **place)
    write_llm(root, "single", checkpoints[0], kv_cache_memory_bytes=8 << 20, max_num_seqs=1, **place)
    shutil.copytree(checkpoints[1], root / "two" / "1")
    write_vllm_model(root, checkpoints[0])
    with running_server(root, model_control_mode="explicit", load_model=("one", "two", "vllm_model")) as running:
        yield running


@pytest.fixture(params=[HttpClient, GrpcClient], ids=["http", "grpc"])
def client(served: RunningServer, request: pytest.FixtureRequest) -> Iterator[ProtocolClient]:
    with request.param(served) as connected:
        yield connected


def write_vllm_model(root: Path, checkpoint: Path) -> None:
    """A model as the samples of Triton's vLLM backend have it: its config says next to nothing."""
    (root / "vllm_model" / "1").mkdir(parents=True)
    described = {"model": str(checkpoint), "gpu_memory_utilization": 0.1, "enforce_eager": True, "max_model_len": 512}
    (root / "vllm_model" / "1" / "model.json").write_text(json.dumps({**described, "disable_log_stats": False}))
    (root / "vllm_model" / "config.pbtxt").write_text(
        'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
        'parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }'
    )


def text_of(client: ProtocolClient, model: str = "one", **inputs: Any) -> str:
    answer = client.infer(model, arrays(**{"text_input": PROMPT, "sampling_parameters": GREEDY, **inputs}))
    return str(answer["text_output"][0], "utf-8")


def test_an_answer_has_the_prompt_before_it_unless_told_otherwise(client: ProtocolClient) -> None:
    text = text_of(client, exclude_input_in_output=True)
    assert text
    assert text_of(client) == PROMPT + text


def test_outputs_come_if_they_are_asked_for(client: ProtocolClient) -> None:
    asked = {
        f"return_{name}": True
        for name in ("finish_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens", "token_ids")
    }
    answer = client.infer("one", arrays(text_input=PROMPT, sampling_parameters=GREEDY, **asked))
    assert answer["finish_reason"].tolist() == [b"length"]
    assert "stop_reason" not in answer.outputs  # nothing comes unasked
    assert answer["num_output_tokens"].tolist() == [len(answer["token_ids"])] == [12]
    assert answer["num_input_tokens"][0] > 3
    assert answer["cumulative_logprob"][0] < 0
    named = client.infer("one", arrays(text_input=PROMPT, sampling_parameters=GREEDY), outputs=["num_output_tokens"])
    assert list(named.outputs) == ["num_output_tokens"]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_outputs_are_those_of_tritons_vllm_backend(
    served: RunningServer, is_streamed: bool, logprobs: int | None
) -> None:
    parameters = GREEDY if logprobs is None else {**GREEDY, "logprobs": logprobs}
    asked = dict.fromkeys(("return_finish_reason", "return_logprobs", "return_num_output_tokens"), True)
    inputs = {"text_input": PROMPT, "sampling_parameters": json.dumps(parameters), "stream": is_streamed, **asked}
    answers = events(served, "/v2/models/vllm_model/generate_stream", inputs)
    outputs = {"text_output", "finish_reason", "logprobs", "num_output_tokens"}
    for answer in answers:
        assert answer.keys() - {"model_name", "model_version", "id"} == outputs
    assert [answer["finish_reason"] for answer in answers] == ["None"] * (len(answers) - 1) + ["length"]
    assert sum(answer["num_output_tokens"] for answer in answers) == 12
    assert len(answers) > 3 or not is_streamed
    for answer in answers:
        entries = json.loads(answer["logprobs"])
        if logprobs is None:
            assert entries is None
            continue
        assert len(entries) == answer["num_output_tokens"]
        text = answer["text_output"].removeprefix(PROMPT if not is_streamed else "")
        best = [next(token for token in entry.values() if token["rank"] == 1) for entry in entries]
        decoded = "".join(token["decoded_token"] for token in best)
        assert decoded == text or "\ufffd" in decoded + text  # a token may be half a character
        for entry in entries:
            assert 1 <= len(entry) <= logprobs + 1
            assert all(int(token_id) >= 0 for token_id in entry)
            assert all(token.keys() == {"logprob", "rank", "decoded_token"} for token in entry.values())
            assert all(isinstance(token["logprob"], float) for token in entry.values())


def test_nothing_comes_unasked(client: ProtocolClient) -> None:
    answer = client.infer("vllm_model", arrays(text_input=PROMPT, sampling_parameters={**GREEDY, "logprobs": 2}))
    assert list(answer.outputs) == ["text_output"]


def test_a_prompt_cannot_be_streamed_in_tritons_words(served: RunningServer) -> None:
    inputs = {"text_input": PROMPT, "stream": True, "exclude_input_in_output": False}
    said = events(served, "/v2/models/vllm_model/generate_stream", inputs)
    assert said == [
        {"error": "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."}
    ]


def test_choices_are_entries(client: ProtocolClient) -> None:
    parameters = {"max_tokens": 6, "n": 3, "seed": 5, "ignore_eos": True}
    answer = client.infer("one", arrays(text_input=PROMPT, sampling_parameters=parameters, return_token_ids=True))
    assert answer["text_output"].shape == (3,)
    assert answer["index"].tolist() == [0, 1, 2]
    assert answer["choice_token_ids"].shape == (1,)


def test_a_conversation_goes_through_the_template(client: ProtocolClient) -> None:
    messages = {"messages": [{"role": "user", "content": "hello"}]}
    answer = client.infer("one", arrays(messages=messages, operation="tokenize"))
    tokens = client.infer("one", arrays(input_ids=answer["token_ids"], operation="detokenize"))
    assert str(tokens["text_output"][0], "utf-8") == "<|bos|><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    by_chat = client.infer("one", arrays(messages=messages, sampling_parameters=GREEDY))
    by_ids = client.infer("one", arrays(input_ids=answer["token_ids"], sampling_parameters=GREEDY))
    assert by_chat["text_output"].tolist() == by_ids["text_output"].tolist()


def test_embeddings_have_length_one(client: ProtocolClient) -> None:
    whole = client.infer("one", arrays(text_input=PROMPT, operation="embed"))["embedding"]
    part = client.infer("one", arrays(text_input=PROMPT, operation="embed", dimensions=8))["embedding"]
    assert (whole.shape, part.shape) == ((48,), (8,))
    assert np.linalg.norm(whole) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(part, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-4, atol=1e-6)


def test_all_ways_to_ask_give_the_same_text(served: RunningServer) -> None:
    with HttpClient(served) as http:
        expected = text_of(http, exclude_input_in_output=True)
    document = {"text_input": PROMPT, "exclude_input_in_output": True, **GREEDY}
    with EventCall(served, "/v2/models/one/generate", document) as call:
        assert call.document()["text_output"] == expected
    said = events(served, "/v2/models/one/generate_stream", {**document, "stream": True})
    assert "".join(event["text_output"] for event in said) == expected
    assert len(said) > 3
    with StreamPeer(served) as peer:
        peer.send(stream_request("one", text_input=PROMPT, sampling_parameters=GREEDY, stream=True))
        answers = peer.rest()
    assert "".join(first_text(answer.outputs["text_output"]) for answer in answers) == expected
    assert [answer.is_final for answer in answers] == [False] * (len(answers) - 1) + [True]


def test_two_models_answer_side_by_side_as_they_do_alone(served: RunningServer) -> None:
    with HttpClient(served) as http:
        alone = {model: text_of(http, model, exclude_input_in_output=True) for model in ("one", "two")}
    assert alone["one"] != alone["two"]
    with StreamPeer(served) as peer:
        peer.send(
            *(
                stream_request(model, f"{model}-{number}", text_input=PROMPT, sampling_parameters=GREEDY, stream=True)
                for number in range(6)
                for model in ("one", "two")
            )
        )
        texts: dict[str, str] = {}
        for answer in peer.rest():
            texts[answer.id] = texts.get(answer.id, "") + first_text(answer.outputs["text_output"])
    assert texts == {f"{model}-{number}": alone[model] for number in range(6) for model in ("one", "two")}


# Clients that leave.


def cancelled(served: RunningServer) -> int:
    model = served.server.repository.get("one", None)
    return served.call(lambda: model.statistics.snapshot().failures[FailureReason.CANCELED])


def is_idle(served: RunningServer) -> bool:
    """No request is at hand, and no block in use."""
    numbers = numbers_of(served, "one")
    return numbers["vllm:num_requests_running"] == numbers["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("way", ["generate_stream", "infer", "ModelStreamInfer"])
def test_who_leaves_frees_the_blocks(served: RunningServer, way: str) -> None:
    before = cancelled(served)
    if way == "ModelStreamInfer":
        with StreamPeer(served) as peer:
            peer.send(stream_request("one", text_input=PROMPT, sampling_parameters=FOREVER, stream=True))
            peer.take(3)
            peer.cancel()
            until_true(lambda: cancelled(served) == before + 1, "the request was cancelled")
    elif way == "generate_stream":
        document = {"text_input": PROMPT, "stream": True, **FOREVER}
        with EventCall(served, "/v2/models/one/generate_stream", document) as call:
            call.next()
    else:
        inputs = arrays(text_input=PROMPT, sampling_parameters=FOREVER)
        with GrpcClient(served) as leaving, pytest.raises(ClientError):
            leaving.infer("one", inputs, client_timeout=0.2)
    until_true(lambda: cancelled(served) == before + 1, "the request was cancelled")
    until_true(lambda: is_idle(served), "its blocks are free")


def test_an_unload_lets_streams_finish(served: RunningServer) -> None:
    parameters = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}
    with HttpClient(served) as http:
        http.load("brief")
        with StreamPeer(served) as peer:
            request = stream_request(
                "brief", text_input=PROMPT, sampling_parameters=parameters, stream=True, return_num_output_tokens=True
            )
            peer.send(request)
            answers = peer.take(1)
            http.unload("brief")
            answers += peer.rest()
        counts = [int.from_bytes(answer.outputs["num_output_tokens"], "little") for answer in answers]
        assert sum(counts) == 1500  # each tells what is new, as in Triton's vLLM backend
        until_true(lambda: not http.is_model_ready("brief"), "it is gone")


# What is wrong is said.


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "needs one of the inputs text_input, messages, input_ids, got none of them"),
        ({"text_input": b"\xff"}, "input 'text_input' is not UTF-8"),
        ({"text_input": "a", "sampling_parameters": {"temprature": 1}}, "did you mean 'temperature'?"),
        ({"text_input": "a", "sampling_parameters": {"max_tokens": 10**9}}, "max_tokens"),
        ({"input_ids": [9999]}, "9999"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(client: ProtocolClient, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError) as caught:
        client.infer("one", arrays(**inputs))
    assert message in caught.value.message
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"text_input": "a", "max_token": 3}, "did you mean 'max_tokens'?"),
        ({"text_input": "a", "temperature": "hot"}, "'temperature'"),
        ({"text_input": ["a", "b"]}, "text_input"),
        ({"prompt": "a"}, "got none of them"),
    ],
)
def test_a_bad_generate_call_is_told_what_is_wrong(served: RunningServer, document: Any, message: str) -> None:
    with EventCall(served, "/v2/models/one/generate", document) as call:
        assert call.status == 400
        assert message in call.document()["error"]


def test_an_error_after_the_others_began_disturbs_nobody(served: RunningServer) -> None:
    with HttpClient(served) as http:
        expected = text_of(http, exclude_input_in_output=True)
    with StreamPeer(served) as peer:
        good = stream_request("one", "good", text_input=PROMPT, sampling_parameters=GREEDY, stream=True)
        peer.send(good, stream_request("one", "bad", text_input=PROMPT, sampling_parameters={"n": -1}))
        answers = peer.rest()
    assert [answer.error[:13] for answer in answers if answer.id == "bad"] == ["parameter 'n'"]
    good_text = "".join(first_text(answer.outputs["text_output"]) for answer in answers if answer.id == "good")
    assert good_text == expected


# Numbers.


def test_metrics_have_vllms_names(served: RunningServer) -> None:
    with HttpClient(served) as http:
        before = numbers_of(served, "two")
        text_of(http, "two")
        text_of(http, "two", text_input="another prompt")
        statistics = http.statistics("two")[0]
    grown = {name: value - before.get(name, 0) for name, value in numbers_of(served, "two").items()}
    assert grown["vllm:generation_tokens_total"] == 24
    assert grown["vllm:request_success_total{length}"] == 2
    assert grown["vllm:prompt_tokens_total"] > 0
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 22
    assert grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert grown["vllm:num_requests_waiting"] == 0
    assert grown["nv_inference_request_success_total"] == 2
    assert statistics["inference_stats"]["success"]["count"] >= 2
    assert statistics["inference_stats"]["queue"]["count"] == statistics["inference_stats"]["success"]["count"]


def test_waiting_requests_are_counted_wherever_they_wait(served: RunningServer) -> None:
    """One runs, one waits in the engine, the others in the queue of the model or its process: pickers see the sum."""
    parameters = {"temperature": 0, "max_tokens": 4000, "ignore_eos": True}
    with HttpClient(served) as http:
        http.load("single")
        with StreamPeer(served) as peer:
            for _ in range(6):
                peer.send(stream_request("single", text_input=PROMPT, sampling_parameters=parameters, stream=True))
            peer.take(1)
            until_true(lambda: numbers_of(served, "single")["vllm:num_requests_waiting"] == 5, "five wait")
            peer.cancel()
        until_true(lambda: numbers_of(served, "single")["vllm:num_requests_waiting"] == 0, "nobody waits")
        http.unload("single")


def test_the_kv_cache_is_described_as_endpoint_pickers_ask_for_it(served: RunningServer) -> None:
    with urllib.request.urlopen(f"http://{served.metrics_url}/metrics") as answer:
        text = answer.read().decode()
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{") and '"one"' in line)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert int(labels["block_size"]) > 0
    assert int(labels["num_gpu_blocks"]) > 0
    assert (labels["cache_dtype"], labels["enable_prefix_caching"], labels["engine"]) == ("auto", "True", "0")
    assert line.endswith(" 1.0")


def test_the_load_report_has_the_kv_cache_as_tritons_has(served: RunningServer) -> None:
    url = f"http://{served.http_url}/v2/models/one/generate"
    # The document is that of NVIDIA's examples.
    document = {"text_input": "hello", "max_tokens": 2, "bad_words": "", "stop_words": ""}
    answer = httpx.post(url, json=document, headers={"endpoint-load-metrics-format": "json"})
    assert answer.status_code == 200, answer.text
    named = json.loads(answer.headers["endpoint-load-metrics"].removeprefix("JSON "))["named_metrics"]
    assert named.keys() == {"inflight", "queue_depth", "kv_cache_utilization", "max_token_capacity"}
    assert 0 <= named["kv_cache_utilization"] <= 1
    assert named["max_token_capacity"] > 0
    answer = httpx.post(url, json=document, headers={"endpoint-load-metrics-format": "text"})
    capacity = f"named_metrics.max_token_capacity={named['max_token_capacity']}"
    assert capacity in answer.headers["endpoint-load-metrics"]


def test_the_config_is_completed(client: ProtocolClient) -> None:
    config = client.model_config("two")
    assert config["backend"] == "llm"
    assert config["model_transaction_policy"]["decoupled"]
    names = {spec["name"] for spec in config["input"]}
    assert {"text_input", "messages", "input_ids", "stream", "sampling_parameters"} <= names
    assert config["parameters"]["max_model_len"]["string_value"] == "512"
