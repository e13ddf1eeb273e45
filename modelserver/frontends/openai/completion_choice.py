"""One choice of a completion, as it grows: pieces -> the choice of a chunk, or of the whole answer."""

from __future__ import annotations

from typing import Any

from modelserver.frontends.llm.pieces import Piece, TokenLogprob
from modelserver.frontends.openai.completion_request import CompletionRequest
from modelserver.frontends.openai.logprobs import CompletionLogprobs, prompt_entries, prompt_logprobs_document


class CompletionChoice:
    """`index` is the choice's in the answer, `echo` the prompt's text if that is to precede it; `prompt_token_ids` are
    told at the beginning."""

    def __init__(
        self, request: CompletionRequest, index: int, *, echo: str | None, prompt_token_ids: list[int] | None
    ) -> None:
        self.index = index
        self.cumulative_logprob = 0.0
        self.num_tokens = 0
        self.is_finished = False
        self._request = request
        self._echo = echo
        self._prompt_token_ids = prompt_token_ids
        self._is_begun = False
        self._logprobs = CompletionLogprobs(by_id=request.options.names_tokens_by_id)
        self._texts: list[str] = []
        self._entries: list[TokenLogprob] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def take(self, piece: Piece) -> None:
        """Note what the model says."""
        if piece.prompt_logprobs is not None:
            self._prompt_logprobs = piece.prompt_logprobs
        if not self._is_begun:
            self._is_begun = True
            self._begin()
        self.cumulative_logprob = piece.cumulative_logprob
        self.num_tokens += piece.num_output_tokens or 0
        if self._request.has_text:
            self._texts.append(piece.text)
            self._entries += piece.logprobs or ()
            self._token_ids += piece.token_ids or ()
        if piece.finish_reason:
            self.finish(piece.finish_reason, piece.stop_reason)

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        """Nothing follows."""
        self._finish_reason, self._stop_reason, self.is_finished = reason, stop_reason, True

    def flush(self) -> dict[str, Any]:
        """The choice with what was noted since the last time."""
        options = self._request.options
        choice: dict[str, Any] = {
            "index": self.index,
            "text": "".join(self._texts),
            "logprobs": None if options.num_logprobs is None else self._logprobs.take(self._entries),
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if options.has_token_ids:
            choice["token_ids"] = self._token_ids
        if self._prompt_token_ids is not None:
            choice["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        if options.num_prompt_logprobs is not None and not options.is_streamed:
            choice["prompt_logprobs"] = prompt_logprobs_document(self._prompt_logprobs)
        self._texts, self._entries, self._token_ids = [], [], []
        return choice

    def _begin(self) -> None:
        if self._echo is None:
            return
        self._texts.append(self._echo)
        if self._prompt_logprobs is not None:
            self._entries += prompt_entries(self._prompt_logprobs, self._echo)
