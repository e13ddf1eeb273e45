"""Rerankers, classifiers and encoders behind a server: the routes of Cohere, Jina, vLLM, TEI and OpenAI for them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient
from support.clients import GrpcClient, HttpClient
from support.layouts import free_port
from support.llm_models import arrays, write_llm
from support.serving import RunningServer, running_server
from support.tiny_classifiers import LABELS, reference_logits, sigmoid, softmax, write_classifier
from support.tiny_encoders import reference_hidden, unit, write_encoder
from tokenizers import Tokenizer

QUERY = "the model of a server"
DOCUMENTS = ["answers every request", "and then it waits", "a server", "for the next one to come", "the model"]
LONG = "a server answers " * 40
MODERATION = ("S", "H", "OK")


class Checkpoints:
    """A cross-encoder, a classifier, one that knows categories of moderation, one of tokens, and an encoder."""

    def __init__(self, root: Path) -> None:
        self.ranker = write_classifier(root / "ranker", "bert", ["relevant"], values={"type_vocab_size": 2})
        self.classifier = write_classifier(root / "classifier", "roberta")
        self.moderator = write_classifier(
            root / "moderator", labels=MODERATION, values={"problem_type": "multi_label_classification"}
        )
        self.tagger = write_classifier(root / "tagger", kind="Token")
        self.encoder = write_encoder(root / "encoder", "mpnet")

    def relevance(self, document: str, query: str = QUERY) -> float:
        return float(sigmoid(reference_logits(self.ranker, query, document))[0])

    def vector(self, text: str) -> Any:
        ids = Tokenizer.from_file(str(self.encoder / "tokenizer.json")).encode(text).ids
        return unit(reference_hidden(self.encoder, ids).mean(axis=0))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def own_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints, own_port: int
) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("ranking")
    for name, directory in vars(checkpoints).items():
        write_llm(root, name, directory, num_threads=1, dtype="float32")
    with running_server(root, exit_on_error=True, api=(f"llamacpp={own_port}",)) as running:
        yield running


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=60) as connected:
        yield connected


def answer_of(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ranked(checkpoints: Checkpoints) -> list[int]:
    return sorted(range(len(DOCUMENTS)), key=lambda index: -checkpoints.relevance(DOCUMENTS[index]))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_a_cross_encoder(http: httpx.Client, checkpoints: Checkpoints, path: str) -> None:
    answer = answer_of(http, path, model="ranker", query=QUERY, documents=DOCUMENTS)
    assert [each["index"] for each in answer["results"]] == ranked(checkpoints)
    for each in answer["results"]:
        document = DOCUMENTS[each["index"]]
        assert each["document"] == {"text": document}
        assert each["relevance_score"] == pytest.approx(checkpoints.relevance(document), abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    given = [{"text": each} for each in DOCUMENTS]
    first = answer_of(http, path, query=QUERY, documents=given, top_n=2, return_documents=False)
    assert first["results"] == [{k: v for k, v in each.items() if k != "document"} for each in answer["results"][:2]]


def test_callers_share_batches(http: httpx.Client, checkpoints: Checkpoints) -> None:
    def ask(query: str) -> Any:
        return answer_of(http, "/score", model="ranker", text_1=query, text_2=DOCUMENTS)["data"]

    queries = [QUERY, "a", "every request that it is given"] * 8
    with ThreadPoolExecutor(8) as pool:
        for query, data in zip(queries, pool.map(ask, queries), strict=True):
            expected = [checkpoints.relevance(each, query) for each in DOCUMENTS]
            np.testing.assert_allclose([each["score"] for each in data], expected, atol=1e-5)


def test_texts_are_in_teis_shape(http: httpx.Client, checkpoints: Checkpoints) -> None:
    answer = answer_of(http, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True)
    assert [each["index"] for each in answer] == ranked(checkpoints)
    for each in answer:
        assert each["text"] == DOCUMENTS[each["index"]]
        assert each["score"] == pytest.approx(reference_logits(checkpoints.ranker, QUERY, each["text"])[0], abs=1e-4)


@pytest.mark.usefixtures("served")
def test_llamacpps_scores_are_raw(checkpoints: Checkpoints, own_port: int) -> None:
    for url in (f"http://127.0.0.1:{own_port}/rerank", f"http://127.0.0.1:{own_port}/reranking"):
        body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 1}
        answer = httpx.post(url, json=body, timeout=60).json()
        (best,) = answer["results"]
        logits = reference_logits(checkpoints.ranker, QUERY, DOCUMENTS[best["index"]])
        assert best["relevance_score"] == pytest.approx(logits[0], abs=1e-4)


def test_an_encoder_ranks_by_the_cosine_of_its_vectors(http: httpx.Client, checkpoints: Checkpoints) -> None:
    expected = [float(checkpoints.vector(QUERY) @ checkpoints.vector(each)) for each in DOCUMENTS]
    answer = answer_of(http, "/rerank", model="encoder", query=QUERY, documents=DOCUMENTS)
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5)
    data = answer_of(http, "/v1/score", model="encoder", queries=[QUERY] * 5, documents=DOCUMENTS)["data"]
    np.testing.assert_allclose([each["score"] for each in data], expected, atol=1e-5)


def test_long_documents_are_cut_where_that_is_asked_for(http: httpx.Client, checkpoints: Checkpoints) -> None:
    refused = http.post("/rerank", json={"model": "ranker", "query": QUERY, "documents": ["a", LONG]})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "documents")
    logits = reference_logits(checkpoints.ranker, QUERY, LONG, truncation=True, max_length=48)
    for path, more in (
        ("/v2/rerank", {}),
        ("/rerank", {"truncate_prompt_tokens": -1}),
        ("/rerank", {"truncate": True}),
    ):
        (found,) = answer_of(http, path, model="ranker", query=QUERY, documents=[LONG], **more)["results"]
        assert found["relevance_score"] == pytest.approx(float(sigmoid(logits)[0]), abs=1e-5)
    (short,) = answer_of(http, "/v2/rerank", query=QUERY, documents=[LONG], max_tokens_per_doc=3)["results"]
    assert short["relevance_score"] == pytest.approx(checkpoints.relevance("a server answers"), abs=1e-5)


def test_texts_are_classified(http: httpx.Client, checkpoints: Checkpoints) -> None:
    answer = answer_of(http, "/classify", model="classifier", input=DOCUMENTS)
    for text, each in zip(DOCUMENTS, answer["data"], strict=True):
        expected = softmax(reference_logits(checkpoints.classifier, text))
        np.testing.assert_allclose(each["probs"], expected, atol=1e-5)
        assert (each["label"], each["num_classes"]) == (LABELS[int(expected.argmax())], 3)
    raw = answer_of(http, "/classify", model="classifier", input=QUERY, use_activation=False)["data"][0]["probs"]
    np.testing.assert_allclose(raw, reference_logits(checkpoints.classifier, QUERY), atol=1e-4)


def test_hugging_faces_client_classifies_and_compares(served: RunningServer, checkpoints: Checkpoints) -> None:
    url = f"http://{served.http_url}"
    with InferenceClient() as client:
        found = client.text_classification(QUERY, model=f"{url}/predict?model=classifier", top_k=2)
        scores = client.sentence_similarity(QUERY, other_sentences=DOCUMENTS, model=f"{url}/similarity?model=encoder")
    expected = softmax(reference_logits(checkpoints.classifier, QUERY))
    order = np.argsort(-expected)[:2]
    assert [each.label for each in found] == [LABELS[index] for index in order]
    np.testing.assert_allclose([each.score for each in found], expected[order], atol=1e-5)
    np.testing.assert_allclose(
        scores, [checkpoints.vector(QUERY) @ checkpoints.vector(each) for each in DOCUMENTS], atol=1e-5
    )


def test_predictions_are_in_teis_shape(http: httpx.Client, checkpoints: Checkpoints) -> None:
    one = answer_of(http, "/predict", model="classifier", inputs=QUERY)
    expected = softmax(reference_logits(checkpoints.classifier, QUERY))
    assert [each["label"] for each in one] == [LABELS[index] for index in np.argsort(-expected)]
    pair, single = answer_of(http, "/predict", model="ranker", inputs=[[QUERY, DOCUMENTS[0]], ["a"]])
    assert pair[0]["score"] == pytest.approx(checkpoints.relevance(DOCUMENTS[0]), abs=1e-5)
    assert single[0]["score"] == pytest.approx(float(sigmoid(reference_logits(checkpoints.ranker, "a"))[0]), abs=1e-5)


def test_pooling_gives_rows_of_tokens(http: httpx.Client, checkpoints: Checkpoints) -> None:
    ids = Tokenizer.from_file(str(checkpoints.encoder / "tokenizer.json")).encode(QUERY).ids
    hidden = reference_hidden(checkpoints.encoder, ids)
    rows = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
    (found,) = answer_of(http, "/pooling", model="encoder", input=QUERY)["data"]
    np.testing.assert_allclose(found["data"], rows, atol=1e-5)
    (raw,) = answer_of(http, "/pooling", model="encoder", input=QUERY, encoding_format="base64")["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw["data"]), "<f4").reshape(rows.shape), rows, atol=1e-5)
    (whole,) = answer_of(http, "/pooling", model="encoder", input=QUERY, task="embed")["data"]
    np.testing.assert_allclose(whole["data"], checkpoints.vector(QUERY), atol=1e-5)
    (tags,) = answer_of(http, "/pooling", model="tagger", input=QUERY)["data"]
    expected = softmax(reference_logits(checkpoints.tagger, QUERY, kind="TokenClassification"))
    np.testing.assert_allclose(tags["data"], expected, atol=1e-5)


def test_openais_client_moderates(served: RunningServer, checkpoints: Checkpoints) -> None:
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as client:
        found = client.moderations.create(input=[QUERY, "a"])
        named = client.moderations.create(model="moderator", input=[{"type": "text", "text": QUERY}])
    expected = sigmoid(reference_logits(checkpoints.moderator, QUERY))
    first = found.results[0]
    assert first.category_scores.sexual == pytest.approx(expected[0], abs=1e-5)
    assert first.category_scores.hate == pytest.approx(expected[1], abs=1e-5)
    assert (first.categories.sexual, first.categories.hate) == (expected[0] >= 0.5, expected[1] >= 0.5)
    assert (first.flagged, first.category_scores.violence) == (bool((expected[:2] >= 0.5).any()), 0.0)
    scores = named.results[0].category_scores.model_dump()
    assert scores == pytest.approx(first.category_scores.model_dump(), abs=1e-6)


@pytest.mark.parametrize("kind", [HttpClient, GrpcClient])
def test_tritons_clients_get_the_same(served: RunningServer, checkpoints: Checkpoints, kind: Any) -> None:
    with kind(served) as client:
        answer = client.infer("ranker", arrays(text_input=QUERY, text_pair=DOCUMENTS[0]))
        assert answer["scores"][0] == pytest.approx(checkpoints.relevance(DOCUMENTS[0]), abs=1e-5)
        tags = client.infer("tagger", arrays(text_input=QUERY))
        expected = softmax(reference_logits(checkpoints.tagger, QUERY, kind="TokenClassification"))
        np.testing.assert_allclose(tags["token_scores"], expected, atol=1e-5)
        assert tags["label"].tolist() == [LABELS[index].encode() for index in expected.argmax(axis=1)]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/rerank", {"model": "classifier", "query": "a", "documents": ["b"]}, "model", "does not compare texts"),
        ("/rerank", {"query": "a"}, "documents", "an array of texts"),
        ("/rerank", {"documents": ["b"]}, "query", "is missing"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "not empty"),
        ("/rerank", {"query": "a", "documents": ["b", 5]}, "documents[1]", "an object with a text"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "there are 2 first texts and 1 second ones"),
        ("/classify", {"model": "encoder", "input": "a"}, "model", "does not classify texts"),
        ("/pooling", {"model": "tagger", "input": "a", "task": "embed"}, "task", "has no task 'embed'"),
        ("/predict", {"model": "classifier", "inputs": [["a", "b", "c"]]}, "inputs", "a pair of texts"),
        ("/v1/moderations", {"model": "classifier", "input": "a"}, "model", "no label of a category"),
        ("/v1/moderations", {"input": [{"type": "image_url"}]}, "input[0]", "only text is judged"),
        ("/v1/completions", {"model": "ranker", "prompt": "a"}, "model", "does not generate text"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
