"""`/rerank`, `/score` and `/similarity`: texts compared with others, in the shapes of Cohere, Jina, vLLM and TEI."""

from __future__ import annotations

from typing import Any

from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.embedding import Reading, find_ranker, score_pairs
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.openai.limits import MAX_PROMPTS
from modelserver.planes.authorized import AnyDataPlane

_MAX_INT32 = 2**31 - 1
_COUNT = Range(1, _MAX_INT32)
# The names that the two sides of `/score` go by.
_FIRST, _SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")


class Ranking:
    """Serves the calls of the routes."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def rerank(self, call: Call, *, cuts: bool = False, is_raw: bool = False) -> None:
        """Answer with documents in the order in which they fit a query; `texts` asks for TEI's shape.

        `cuts`: texts that are too long are cut, if the model can, unless the request says otherwise. `is_raw`: scores
        are the network's own numbers, likewise. Raises ServerError.
        """
        fields = call.fields
        model = await find_ranker(self._dataplane, fields.text("model"))
        fields.need("query", "a string")
        query = fields.text("query") or ""
        is_tei = fields.has("texts")
        documents = self._documents(fields, "texts" if is_tei else "documents")
        most = fields.integer("top_n", Range(0, _MAX_INT32)) or len(documents)
        cuts = cuts and "truncate_prompt_tokens" in model.inputs
        reading = read_reading(fields, cuts=cuts, is_raw=is_raw)
        scored = await score_pairs(self._dataplane, model, call, [(query, each) for each in documents], reading)
        order = sorted(range(len(documents)), key=lambda index: -scored.scores[index])[:most]
        if is_tei:
            has_texts = fields.flag("return_text")
            answer = [{"index": index, "score": scored.scores[index]} for index in order]
            call.answer([each | {"text": documents[int(each["index"])]} for each in answer] if has_texts else answer)
            return
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scored.scores[index]} for index in order]
        if fields.flag("return_documents", True):
            results = [each | {"document": {"text": documents[each["index"]]}} for each in results]
        call.answer(
            {
                "id": call.make_id("rerank-"),
                "object": "list",
                "model": model.shown_name,
                "usage": usage_of(scored.num_tokens),
                "results": results,
            }
        )

    async def score(self, call: Call) -> None:
        """Answer with a score for each pair of a text with another; a single one goes with all others.

        Raises ServerError.
        """
        fields = call.fields
        model = await find_ranker(self._dataplane, fields.text("model"))
        first, second = (self._side(fields, names) for names in (_FIRST, _SECOND))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise ParameterError(
                f"there are {len(first)} first texts and {len(second)} second ones: expected one first text, or one "
                "for each second one",
                next(name for name in _FIRST if fields.has(name)),
                Fault.INVALID_VALUE,
            )
        pairs = list(zip(first, second, strict=True))
        scored = await score_pairs(self._dataplane, model, call, pairs, read_reading(fields))
        call.answer(
            {
                "id": call.make_id("score-"),
                "object": "list",
                "created": call.created_s,
                "model": model.shown_name,
                "data": [
                    {"index": index, "object": "score", "score": score} for index, score in enumerate(scored.scores)
                ],
                "usage": usage_of(scored.num_tokens),
            }
        )

    async def similarity(self, call: Call) -> None:
        """Answer with an array of scores: one sentence compared with others, in TEI's shape. Raises ServerError."""
        fields = call.fields
        model = await find_ranker(self._dataplane, fields.text("model") or call.query("model"))
        fields.need("inputs", "an object with source_sentence and sentences")
        inputs = fields.fields("inputs")
        assert inputs is not None, "it is there"
        inputs.need("source_sentence", "a string")
        inputs.need("sentences", "an array of strings")
        source = inputs.text("source_sentence") or ""
        sentences = inputs.texts("sentences", MAX_PROMPTS) or []
        pairs = [(source, sentence) for sentence in sentences]
        scored = await score_pairs(self._dataplane, model, call, pairs, read_reading(fields)) if pairs else None
        call.answer(scored.scores if scored else [])

    def _documents(self, fields: Fields, name: str) -> list[str]:
        """Texts, or objects that have one. Raises ParameterError."""
        fields.need(name, "an array of texts")
        items = fields.items(name, MAX_PROMPTS) or []
        if not items:
            raise fields.wrong(name, "an array that is not empty", items)
        found = []
        for index, item in enumerate(items):
            text = item.get("text") if isinstance(item, dict) else item
            if not isinstance(text, str):
                raise fields.wrong(f"{name}[{index}]", "a text, or an object with a text", item)
            found.append(text)
        return found

    def _side(self, fields: Fields, names: tuple[str, ...]) -> list[str]:
        name = next((each for each in names if fields.has(each)), names[0])
        value = fields.document.get(name)
        return [value] if isinstance(value, str) else self._documents(fields, name)


def read_reading(fields: Fields, *, cuts: bool = False, is_raw: bool = False) -> Reading:
    """How the request wants texts to be read: in vLLM's words, in TEI's, and in Cohere's. Raises ParameterError."""
    truncation = fields.integer("truncate_prompt_tokens", Range(-1, _MAX_INT32))
    if truncation is None and fields.flag("truncate", cuts):
        truncation = -1
    if fields.text("truncation_direction") not in (None, "Right", "right"):
        raise ParameterError(
            "'truncation_direction' is not supported: the end of a text is cut",
            "truncation_direction",
            Fault.UNSUPPORTED_PARAMETER,
        )
    for name in ("use_activation", "activation", "softmax"):
        if fields.has(name):
            is_raw = not fields.flag(name)
    return Reading(
        truncation=truncation,
        pair_truncation=fields.integer("max_tokens_per_doc", _COUNT),
        is_raw=fields.flag("raw_scores", is_raw),
    )


def usage_of(num_tokens: int) -> dict[str, int]:
    """The member `usage` of an answer without generated text."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
