"""`POST /api/embed`, and `/api/embeddings`, which was before it and takes one text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.embedding import embed
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.ollama.answers import OllamaDurations
from modelserver.frontends.ollama.limits import MAX_INPUTS
from modelserver.frontends.ollama.models import OllamaModels
from modelserver.frontends.ollama.options import read_keep_alive, read_options

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane

_MAX_DIMENSIONS = 1 << 20
# As long as the model takes.
_LONGEST = -1


class Embedding:
    """Serves both routes."""

    def __init__(self, dataplane: AnyDataPlane, models: OllamaModels) -> None:
        self._dataplane = dataplane
        self._models = models

    async def embed(self, call: Call) -> None:
        """Answer with a vector for each text. Raises ServerError."""
        durations = OllamaDurations()
        fields = call.fields
        texts = _read_input(fields)
        read_options(fields)
        keep_alive_s = read_keep_alive(fields)
        model = await self._models.find(fields, "embeds")
        inputs = self._common(fields, model)
        durations.note_sent()
        made = await embed(self._dataplane, model, call, [inputs | {"text_input": text} for text in texts])
        self._models.keep(call, model.name, keep_alive_s)
        call.answer(
            {
                "model": fields.text("model") or model.name,
                "embeddings": [vector.tolist() for vector in made.vectors],
                **durations.loaded(),
                "prompt_eval_count": made.num_tokens,
            }
        )

    async def embed_one(self, call: Call) -> None:
        """Answer with the vector of one text. Raises ServerError."""
        fields = call.fields
        text = fields.text("prompt") or ""
        read_options(fields)
        model = await self._models.find(fields, "embeds")
        if not text:
            # A call without a text only loads the model.
            call.answer({"embedding": []})
            return
        made = await embed(self._dataplane, model, call, [self._common(fields, model) | {"text_input": text}])
        call.answer({"embedding": made.vectors[0].tolist()})

    def _common(self, fields: Fields, model: LanguageModel) -> dict[str, Any]:
        """The inputs besides the text. Raises ParameterError."""
        inputs: dict[str, Any] = {}
        dimensions = fields.integer("dimensions", Range(0, _MAX_DIMENSIONS))
        if dimensions:
            if "dimensions" not in model.inputs:
                raise ParameterError(
                    f"model '{model.name}' has embeddings of one size only: leave 'dimensions' out", "dimensions"
                )
            inputs["dimensions"] = dimensions
        if fields.flag("truncate", True) and "truncate_prompt_tokens" in model.inputs:
            inputs["truncate_prompt_tokens"] = _LONGEST
        return inputs


def _read_input(fields: Fields) -> list[str]:
    fields.need("input", "a text or an array of texts")
    value = fields.document["input"]
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ParameterError(f"invalid input type: expected a text or an array of texts, got {value!r:.60}", "input")
    return fields.texts("input", MAX_INPUTS) or []
