"""Fill in the middle: the prompt that a model's own tokens make of the texts before and after a gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelserver.frontends.llm.call import GenerateCall, Prompt
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.prompts import token_ids_of

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane

# How the model families write "before", "after" and "middle" of a text that is to be filled in.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek's own characters
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# Tokens that end a filling and that not every model has as its end of text: of Qwen, StarCoder, Granite, CodeLlama and
# CodeGemma.
_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<file_sep>",
    "▁<EOT>",
)


@dataclass(frozen=True, slots=True)
class FillMarks:
    """The ids of a model's marks. `ends` are the tokens that end a filling, `start` those that begin every text."""

    before: int
    after: int
    middle: int
    ends: tuple[int, ...]
    start: tuple[int, ...]

    def prompt(self, before: Sequence[int], after: Sequence[int], files: Sequence[int] = ()) -> list[int]:
        """`files` are texts beside the one with the gap."""
        return [*self.start, *files, self.before, *before, self.after, *after, self.middle]


def no_marks(model: LanguageModel) -> str:
    """The error for a model whose tokenizer has no marks."""
    return (
        f"model '{model.name}' does not fill in the middle: its tokenizer has no tokens for it, such as "
        f"{' '.join(_MARKS[0])}"
    )


async def fill_marks(dataplane: AnyDataPlane, model: LanguageModel) -> FillMarks | None:
    """The marks that the model's tokenizer has as single tokens; None if it has none. Raises ServerError."""

    async def ids_of(texts: Sequence[str]) -> list[list[int]]:
        prompts = [{"text_input": text} for text in texts]
        return await token_ids_of(dataplane, model, prompts, adds_special_tokens=False)

    firsts = await ids_of([marks[0] for marks in _MARKS])
    for marks, first in zip(_MARKS, firsts, strict=True):
        if len(first) != 1:
            continue
        after, middle, *ends = await ids_of([*marks[1:], *_ENDS])
        if len(after) == len(middle) == 1:
            (start,) = await token_ids_of(dataplane, model, [{"text_input": ""}], adds_special_tokens=True)
            single = [each[0] for each in ends if len(each) == 1]
            return FillMarks(first[0], after[0], middle[0], tuple(single), tuple(start))
    return None


async def filled(dataplane: AnyDataPlane, model: LanguageModel, asked: GenerateCall) -> GenerateCall:
    """The call with prompts in which the suffix stands, and without it.

    Raises ParameterError for a model that has no tokens for it.
    """
    marks = await fill_marks(dataplane, model) if "operation" in model.inputs else None
    if marks is None:
        raise ParameterError(f"'suffix' is not supported: {no_marks(model)}", "suffix", Fault.UNSUPPORTED_PARAMETER)
    texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
    prompts = [{"text_input": text} for text in (asked.suffix, *texts)]
    if asked.adds_special_tokens is False:
        marks = replace(marks, start=())
    after, *found = await token_ids_of(dataplane, model, prompts, adds_special_tokens=False)
    ids = iter(found)
    filled_in: list[Prompt] = [
        marks.prompt(next(ids) if isinstance(prompt, str) else prompt, after) for prompt in asked.prompts
    ]
    sampling = asked.sampling
    if marks.ends and "sampling_parameters" in model.inputs:
        sampling = {**sampling, "stop_token_ids": [*sampling.get("stop_token_ids", ()), *marks.ends]}
    return replace(asked, prompts=tuple(filled_in), suffix="", sampling=sampling)
