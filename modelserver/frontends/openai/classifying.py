"""`/classify`, `/pooling`, `/predict` and `/v1/moderations`: what a model says of texts, in the shapes of vLLM, TEI and
OpenAI."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.embedding import Reading, classify, pool
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.llm.models import LanguageModel, find_model, known_models
from modelserver.frontends.openai.completion_request import read_prompts
from modelserver.frontends.openai.limits import MAX_PROMPTS
from modelserver.frontends.openai.ranking import read_reading, usage_of
from modelserver.planes.authorized import AnyDataPlane

# By task of `/pooling`: the operation, the output, and the property of a model that has it.
_TASKS: Mapping[str, tuple[str, str, str]] = {
    "embed": ("embed", "embedding", "embeds"),
    "token_embed": ("token_embed", "token_embeddings", "embeds"),
    "classify": ("classify", "scores", "classifies"),
    "token_classify": ("classify", "token_scores", "classifies_tokens"),
}
_MODERATIONS = frozenset({"omni-moderation-latest", "text-moderation-latest", "text-moderation-stable"})
_ALL = Range(1, 2**31 - 1)


class Classifying:
    """Serves the calls of the routes."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def classify(self, call: Call) -> None:
        """Answer with the probabilities of each text's labels, in vLLM's shape. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"), "classifies")
        inputs = self._inputs(fields, "input")
        found = await classify(self._dataplane, model, call, inputs, read_reading(fields))
        data = []
        for index, scores in enumerate(found.scores):
            data.append(
                {
                    "index": index,
                    "label": model.labels[int(scores.argmax())],
                    "probs": scores.tolist(),
                    "num_classes": len(scores),
                }
            )
        call.answer(self._list(call, model, "classify-", data, found.num_tokens))

    async def pool(self, call: Call) -> None:
        """Answer with the rows or numbers of each text, in vLLM's shape. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"), "pools")
        task = fields.word("task", tuple(_TASKS)) or _usual_task(model)
        operation, output, use = _TASKS[task]
        if not getattr(model, use) or output not in model.outputs:
            raise ParameterError(f"the model '{model.name}' has no task '{task}'", "task", Fault.UNSUPPORTED_PARAMETER)
        is_base64 = fields.word("encoding_format", ("float", "base64")) == "base64"
        said = read_reading(fields).inputs()
        inputs = [each | said for each in self._inputs(fields, "input")]
        found = await pool(self._dataplane, model, call, inputs, operation=operation, output=output)
        data = [
            {"index": index, "object": "pooling", "data": _encoded(array, is_base64=is_base64)}
            for index, array in enumerate(found.vectors)
        ]
        call.answer(self._list(call, model, "pool-", data, found.num_tokens))

    async def predict(self, call: Call) -> None:
        """Answer with the labels of texts or pairs, the best first, in TEI's shape; or, with `parameters`, in that of
        Hugging Face's pipelines. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model") or call.query("model"), "classifies")
        fields.need("inputs", "a text, a pair of texts, or an array of those")
        value = fields.document["inputs"]
        is_batch = isinstance(value, list) and not all(isinstance(each, str) for each in value)
        asked = fields.items("inputs", MAX_PROMPTS) if is_batch else [value]
        inputs = [_sequence(fields, each) for each in asked or []]
        parameters = fields.fields("parameters")
        reading, most = read_reading(fields), None
        if parameters is not None:
            most = parameters.integer("top_k", _ALL)
            if parameters.word("function_to_apply", ("none",)) is not None:
                reading = Reading(truncation=reading.truncation, is_raw=True)
        found = await classify(self._dataplane, model, call, inputs, reading)
        answers = [_ranked(model, scores)[:most] for scores in found.scores]
        call.answer(answers if is_batch or parameters is not None else answers[0])

    async def moderate(self, call: Call) -> None:
        """Answer with what a classifier finds objectionable in texts, in OpenAI's shape. Raises ServerError."""
        fields = call.fields
        model = await self._moderator(fields.text("model"))
        texts = self._moderated_texts(fields)
        inputs = [{"text_input": text} for text in texts]
        found = await classify(self._dataplane, model, call, inputs, Reading(truncation=-1))
        categories = categories_of(model.labels)
        results = [moderated(categories, scores.tolist()) for scores in found.scores]
        call.answer({"id": call.make_id("modr-"), "model": model.shown_name, "results": results})

    async def _moderator(self, name: str | None) -> LanguageModel:
        """The model of that name; OpenAI's names mean the only one that knows categories of moderation."""
        if not name or name in _MODERATIONS:
            found = [model for model in await known_models(self._dataplane) if categories_of(model.labels)]
            if len(found) == 1:
                name = found[0].name
        model = await find_model(self._dataplane, name, "classifies")
        if not categories_of(model.labels):
            raise ParameterError(
                f"the model '{model.name}' has no label of a category of moderation", "model", Fault.UNSUPPORTED_MODEL
            )
        return model

    def _inputs(self, fields: Fields, name: str) -> list[dict[str, Any]]:
        prompts = read_prompts(fields, name)
        return [{"text_input" if isinstance(prompt, str) else "input_ids": prompt} for prompt in prompts]

    def _moderated_texts(self, fields: Fields) -> list[str]:
        """One text, several, or the parts of one. Raises ParameterError."""
        fields.need("input", "a string, an array of strings, or an array of parts")
        value = fields.document["input"]
        if isinstance(value, str):
            return [value]
        items = fields.items("input", MAX_PROMPTS) or []
        if not items:
            raise fields.wrong("input", "an array that is not empty", value)
        if all(isinstance(item, dict) for item in items):
            return ["\n".join(_part(fields, index, item) for index, item in enumerate(items))]
        return fields.texts("input", MAX_PROMPTS) or []

    def _list(
        self, call: Call, model: LanguageModel, prefix: str, data: list[dict[str, Any]], num_tokens: int
    ) -> dict[str, Any]:
        return {
            "id": call.make_id(prefix),
            "object": "list",
            "created": call.created_s,
            "model": model.shown_name,
            "data": data,
            "usage": usage_of(num_tokens),
        }


def _usual_task(model: LanguageModel) -> str:
    if model.classifies:
        return "classify"
    if model.classifies_tokens:
        return "token_classify"
    return "token_embed" if "token_embeddings" in model.outputs else "embed"


def _encoded(array: np.ndarray[Any, Any], *, is_base64: bool) -> Any:
    return base64.b64encode(array.astype("<f4").tobytes()).decode() if is_base64 else array.tolist()


def _sequence(fields: Fields, value: Any) -> dict[str, Any]:
    """A text, an array of one, or a pair."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 1 <= len(texts) <= 2 or not all(isinstance(text, str) for text in texts):
        raise fields.wrong("inputs", "a text, a pair of texts, or an array of those", value)
    return dict(zip(("text_input", "text_pair"), texts, strict=False))


def _ranked(model: LanguageModel, scores: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable")
    return [{"score": float(scores[index]), "label": model.labels[index]} for index in order]


def _part(fields: Fields, index: int, part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        path = fields.path(f"input[{index}]")
        raise ParameterError(f"'{path}': only text is judged here", path, Fault.UNSUPPORTED_CONTENT)
    return text


CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
# Labels of public classifiers, in lower case with one kind of mark: OpenAI's own short ones, and Jigsaw's.
_ALIASES: Mapping[str, str] = {
    "s": "sexual",
    "h": "hate",
    "v": "violence",
    "hr": "harassment",
    "sh": "self-harm",
    "s3": "sexual/minors",
    "h2": "hate/threatening",
    "v2": "violence/graphic",
    "toxic": "harassment",
    "toxicity": "harassment",
    "severe toxic": "harassment",
    "severe toxicity": "harassment",
    "insult": "harassment",
    "threat": "harassment/threatening",
    "identity hate": "hate",
    "identity attack": "hate",
    "hate speech": "hate",
    "obscene": "sexual",
    "sexual explicit": "sexual",
    "nsfw": "sexual",
    "suicide": "self-harm",
    "violent": "violence",
}
_THRESHOLD = 0.5


def categories_of(labels: Sequence[str]) -> dict[int, str]:
    """The category of each label that stands for one, by its place."""
    found = {}
    for place, label in enumerate(labels):
        plain = " ".join(label.lower().replace("_", " ").replace("-", " ").replace("/", " ").split())
        category = _ALIASES.get(plain) or next((each for each in CATEGORIES if _plain(each) == plain), None)
        if category is not None:
            found[place] = category
    return found


def moderated(categories: Mapping[int, str], scores: Sequence[float]) -> dict[str, Any]:
    """A result of OpenAI's: the highest score of each category; one that no label stands for has 0."""
    highest = dict.fromkeys(CATEGORIES, 0.0)
    for place, category in categories.items():
        highest[category] = max(highest[category], scores[place])
    flags = {category: score >= _THRESHOLD for category, score in highest.items()}
    judged = set(categories.values())
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": highest,
        "category_applied_input_types": {category: ["text"] if category in judged else [] for category in CATEGORIES},
    }


def _plain(category: str) -> str:
    return category.replace("-", " ").replace("/", " ")
