"""Embeddings of encoders behind a server: OpenAI's own client, Triton's protocols, and what is wrong with a request."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from gguf import PoolingType
from support.clients import GrpcClient, HttpClient
from support.gguf_encoders import write_encoder_gguf
from support.llm_models import arrays, numbers_of, write_llm
from support.mock_llm import write_mock_llm
from support.serving import RunningServer, running_server
from support.tiny_encoders import SIZE, reference_hidden, unit, write_encoder
from tokenizers import Tokenizer

TEXT = "the model of a server"
ENSEMBLE = """
platform: "ensemble"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "NORMALISED" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "FIRST" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "plain" model_version: -1
    input_map { key: "text_input" value: "TEXT" } output_map { key: "embedding" value: "NORMALISED" } }
  step { model_name: "hosted" model_version: -1
    input_map { key: "text_input" value: "TEXT" } output_map { key: "embedding" value: "FIRST" } }
}
"""
TEXTS = [TEXT, "and", "it waits for the next one to come", "every request", "a server answers"] * 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "tiny", "mpnet")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[RunningServer]:
    """One is a directory of sentence-transformers as it is, one has options and a process of its own, one a cache."""
    root = tmp_path_factory.mktemp("encoders")
    (root / "plain").mkdir()
    (root / "plain" / "1").symlink_to(checkpoint)
    write_llm(root, "hosted", checkpoint, instance_in_process="true", max_num_seqs=4, pooling="cls", normalize="false")
    write_llm(root, "cached", checkpoint)
    with (root / "cached" / "config.pbtxt").open("a") as file:
        file.write("\nresponse_cache { enable: true }")
    (root / "both" / "1").mkdir(parents=True)
    (root / "both" / "config.pbtxt").write_text(ENSEMBLE)
    (root / "lone" / "1").mkdir(parents=True)
    words = write_encoder(tmp_path_factory.mktemp("words") / "tiny")
    write_encoder_gguf(words, root / "lone" / "1" / "words.gguf", "bert", pooling=PoolingType.CLS)
    write_llm(root, "words", words, pooling="cls")
    write_mock_llm(root, "mock")
    with running_server(root, exit_on_error=True, cache_config=("local,size=1048576",)) as running:
        yield running


@pytest.fixture
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=60) as connected:
        yield connected


def test_a_lone_gguf_file_answers_as_its_checkpoint(client: openai.OpenAI) -> None:
    """Without a config.pbtxt: word pieces and pooling are in the file."""
    found, expected = (client.embeddings.create(model=name, input=TEXTS[:3]) for name in ("lone", "words"))
    for one, other in zip(found.data, expected.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)
    assert found.usage == expected.usage


def hidden_of(checkpoint: Path, text: str) -> Any:
    return reference_hidden(checkpoint, token_ids_of(checkpoint, text))


def token_ids_of(checkpoint: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    return ids


def test_a_directory_of_sentence_transformers_is_a_model(client: openai.OpenAI, checkpoint: Path) -> None:
    assert {model.id: getattr(model, "max_model_len", None) for model in client.models.list()} == {
        "cached": 48,
        "hosted": 48,
        "lone": 64,
        "mock": None,
        "plain": 48,
        "words": 48,
    }
    found = client.embeddings.create(model="plain", input=TEXTS)
    for text, each in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(each.embedding, unit(hidden_of(checkpoint, text).mean(axis=0)), atol=1e-5)
    num_tokens = sum(len(token_ids_of(checkpoint, text)) for text in TEXTS)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)


async def test_callers_share_batches_and_not_answers(served: RunningServer, checkpoint: Path) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0
    ) as async_client:
        answers = await asyncio.gather(
            *(async_client.embeddings.create(model="hosted", input=text, encoding_format="float") for text in TEXTS)
        )
    for text, found in zip(TEXTS, answers, strict=True):
        np.testing.assert_allclose(found.data[0].embedding, hidden_of(checkpoint, text)[0], atol=1e-5)


def test_dimensions_tokens_and_formats(http: httpx.Client, checkpoint: Path) -> None:
    def vectors(**body: Any) -> list[Any]:
        answer = http.post("/v1/embeddings", json={"model": "plain", **body})
        assert answer.status_code == 200, answer.text
        return [each["embedding"] for each in answer.json()["data"]]

    (whole,) = vectors(input=TEXT)
    assert len(whole) == SIZE
    (part,) = vectors(input=TEXT, dimensions=6)
    np.testing.assert_allclose(part, unit(np.array(whole[:6])), rtol=1e-6)
    (raw,) = vectors(input=TEXT, encoding_format="base64")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), np.array(whole, np.float32))
    token_ids = token_ids_of(checkpoint, TEXT)
    np.testing.assert_allclose(vectors(input=[token_ids, token_ids[1:-1]])[0], whole, atol=1e-6)
    bare = unit(reference_hidden(checkpoint, token_ids[1:-1]).mean(axis=0))
    np.testing.assert_allclose(vectors(input=TEXT, add_special_tokens=False)[0], bare, atol=1e-5)
    long = TEXT + " and so on" * 40
    cut = unit(reference_hidden(checkpoint, [*token_ids_of(checkpoint, long)[:47], 2]).mean(axis=0))
    np.testing.assert_allclose(vectors(input=long, truncate_prompt_tokens=-1)[0], cut, atol=1e-5)
    np.testing.assert_allclose(vectors(input=token_ids, truncate_prompt_tokens=4)[0], vectors(input=token_ids[:4])[0])
    told = http.post("/tokenize", json={"model": "plain", "prompt": TEXT}).json()
    assert (told["tokens"], told["max_model_len"]) == (token_ids, 48)


@pytest.mark.parametrize(
    ("path", "given", "param", "code", "words"),
    [
        (
            "/v1/embeddings",
            {"input": "a " * 47},
            "input",
            "context_length_exceeded",
            "49 tokens, and this model takes 1 to 48",
        ),
        ("/v1/embeddings", {"input": ["a", "a " * 99]}, "input", "context_length_exceeded", "101 tokens"),
        ("/v1/embeddings", {"input": [7] * 49}, "input", "context_length_exceeded", "49 tokens"),
        ("/v1/embeddings", {"input": [[5], [300]]}, "input", None, "token 300 is outside the model's vocabulary"),
        ("/v1/embeddings", {"input": []}, "input", "invalid_value", "not empty"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input", "invalid_value", "an array"),
        ("/v1/embeddings", {"input": [5, "a"]}, "input[1]", "invalid_value", ""),
        ("/v1/embeddings", {}, "input", "missing_required_parameter", ""),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions", None, "at most 32, got 33"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": "a"}]},
            "messages",
            None,
            "has no input 'messages'",
        ),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": 49},
            "truncate_prompt_tokens",
            None,
            "or 1 to 48, got 49",
        ),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": -2},
            "truncate_prompt_tokens",
            "invalid_value",
            "",
        ),
        ("/v1/completions", {"prompt": "a"}, "model", "unsupported_model", "does not generate text"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "model",
            "unsupported_model",
            "does not generate text",
        ),
        ("/detokenize", {"tokens": [5]}, "model", "unsupported_model", ""),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages", None, "has no input 'messages'"),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, path: str, given: dict[str, Any], param: str, code: str | None, words: str
) -> None:
    answer = http.post(path, json={"model": "plain", **given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert words in error["message"]
    assert http.post("/v1/embeddings", json={"model": "plain", "input": "a"}).status_code == 200


@pytest.mark.parametrize("kind", [HttpClient, GrpcClient])
@pytest.mark.parametrize("model", ["plain", "hosted"])
def test_tritons_clients_get_the_same(served: RunningServer, checkpoint: Path, kind: Any, model: str) -> None:
    hidden = hidden_of(checkpoint, TEXT)
    expected = unit(hidden.mean(axis=0)) if model == "plain" else hidden[0]
    with kind(served) as client:
        answer = client.infer(model, arrays(text_input=TEXT))
        np.testing.assert_allclose(answer["embedding"], expected, atol=1e-5)
        assert answer["num_input_tokens"].tolist() == [len(token_ids_of(checkpoint, TEXT))]
        assert answer.outputs.keys() == {"embedding", "num_input_tokens"}


def test_ensembles_and_the_response_cache_take_an_encoder(served: RunningServer, checkpoint: Path) -> None:
    hidden = hidden_of(checkpoint, TEXT)
    with HttpClient(served) as client:
        answer = client.infer("both", {"TEXT": np.array([TEXT.encode()], object)})
        np.testing.assert_allclose(answer["NORMALISED"], unit(hidden.mean(axis=0)), atol=1e-5)
        np.testing.assert_allclose(answer["FIRST"], hidden[0], atol=1e-5)
        first, again = (client.infer("cached", arrays(text_input=TEXT)) for _ in range(2))
        np.testing.assert_array_equal(first["embedding"], again["embedding"])
    assert numbers_of(served, "cached")["nv_cache_num_hits_per_model_total"] == 1


def test_metadata_metrics_and_the_generate_route(served: RunningServer, http: httpx.Client) -> None:
    metadata = http.get("/v2/models/plain").json()
    assert {"name": "embedding", "datatype": "FP32", "shape": [-1]} in metadata["outputs"]
    assert "stream" not in {each["name"] for each in metadata["inputs"]}
    before = numbers_of(served, "plain")
    body = json.loads(http.post("/v2/models/plain/generate", json={"text_input": TEXT}).text)
    assert len(body["embedding"]) == SIZE
    after = numbers_of(served, "plain")
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:prompt_tokens_total"] == body["num_input_tokens"]
    assert grown["vllm:request_success_total{stop}"] == grown["nv_inference_count_total"] == 1
