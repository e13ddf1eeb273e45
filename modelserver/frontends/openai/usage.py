"""How many tokens a call took."""

from __future__ import annotations

from typing import Any

from modelserver.frontends.llm.pieces import Piece


class Usage:
    """Sums over the prompts of a call and their choices."""

    def __init__(self) -> None:
        self._num_inputs: dict[int, int] = {}
        self._num_cached: dict[int, int] = {}
        self._num_outputs = 0
        # How many of the outputs were reasoning; None of models that do not tell it from the rest.
        self.num_reasoning_tokens: int | None = None

    def take(self, prompt: int, piece: Piece) -> None:
        """Note what a piece says of prompt number `prompt` and its choice."""
        if piece.num_input_tokens is not None:
            self._num_inputs[prompt] = piece.num_input_tokens
        if piece.num_cached_tokens is not None:
            self._num_cached[prompt] = piece.num_cached_tokens
        num_new = piece.num_output_tokens
        if num_new is None:
            # A model that does not count may still tell its tokens.
            num_new = len((piece.token_ids if piece.token_ids is not None else piece.logprobs) or ())
        self._num_outputs += num_new

    def document(self) -> dict[str, Any]:
        """As `usage` of an answer."""
        num_inputs, num_outputs = sum(self._num_inputs.values()), self._num_outputs
        document: dict[str, Any] = {
            "prompt_tokens": num_inputs,
            "completion_tokens": num_outputs,
            "total_tokens": num_inputs + num_outputs,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }
        if self.num_reasoning_tokens is not None:
            document["completion_tokens_details"] = {"reasoning_tokens": min(num_outputs, self.num_reasoning_tokens)}
        return document
