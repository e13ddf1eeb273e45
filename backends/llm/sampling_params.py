"""How the tokens of one request are to be chosen, and when to stop: vLLM's names, ranges and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked once, by `from_json` or when made. Nothing here depends on the model but `max_tokens`'s upper bound.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 do nothing; neither do penalties of 0
    (`repetition_penalty` of 1). `max_tokens` None: as many as the model's length allows. `logprobs`: how many
    alternatives to report with each token besides itself; `prompt_logprobs` the same for the prompt's tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    # What the text must be: {"json": schema} | {"json_object": true} | {"regex": "..."} | {"choice": [...]} |
    # {"grammar": "..."}; compiled by `grammar/`.
    structured_outputs: Mapping[str, Any] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5
