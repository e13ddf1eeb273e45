"""The choices of a generation: token deltas of a model -> events; and how many tokens all of them took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelserver.frontends.llm.events import Event, Finish, Reasoning, Text, TokenLogprob, Tokens, ToolDelta, ToolEnd
from modelserver.frontends.llm.harmony import HarmonyReader
from modelserver.frontends.llm.reasoning import ReasoningReader
from modelserver.frontends.llm.token_deltas import UNFINISHED, TokenDelta
from modelserver.frontends.llm.tools import ToolReader


class Usage:
    """How many tokens a call took: sums over its prompts and their choices.

    `num_reasoning_tokens` of the outputs were reasoning; None of models that do not tell it from the rest.
    `num_predicted` tokens of a prediction were accepted, and rejected; None without one, or of models that take none.
    """

    def __init__(self) -> None:
        self._num_inputs: dict[int, int] = {}
        self._num_cached: dict[int, int] = {}
        self.num_output_tokens = 0
        self.num_reasoning_tokens: int | None = None
        self.num_predicted: tuple[int, int] | None = None

    @property
    def num_input_tokens(self) -> int:
        return sum(self._num_inputs.values())

    @property
    def num_cached_tokens(self) -> int:
        """How many of the inputs were known from before."""
        return sum(self._num_cached.values())

    def num_inputs_of(self, prompt: int) -> int:
        return self._num_inputs.get(prompt, 0)

    def num_cached_of(self, prompt: int) -> int:
        return self._num_cached.get(prompt, 0)

    def take(self, prompt: int, delta: TokenDelta) -> None:
        """Note what a delta says of prompt number `prompt` and its choice."""
        if delta.num_input_tokens is not None:
            self._num_inputs[prompt] = delta.num_input_tokens
        if delta.num_cached_tokens is not None:
            self._num_cached[prompt] = delta.num_cached_tokens
        if delta.num_predicted is not None:
            before = self.num_predicted or (0, 0)
            self.num_predicted = before[0] + delta.num_predicted[0], before[1] + delta.num_predicted[1]
        num_new = delta.num_output_tokens
        if num_new is None:
            # A model that does not count may still tell its tokens.
            num_new = len((delta.token_ids if delta.token_ids is not None else delta.logprobs) or ())
        self.num_output_tokens += num_new


class Choice:
    """One continuation of prompt number `prompt`; `number` counts the choices of all prompts.

    `has_tokens`: the call wants token ids or log-probabilities. `tells_reasoning`: it wants reasoning; else that is
    left out. `echo` is text that precedes what the model says.
    """

    def __init__(
        self,
        prompt: int,
        number: int,
        *,
        has_tokens: bool = False,
        reasoning: ReasoningReader | HarmonyReader | None = None,
        tells_reasoning: bool = True,
        tools: ToolReader | None = None,
        echo: str = "",
    ) -> None:
        self.prompt = prompt
        self.number = number
        self.is_finished = False
        self.cumulative_logprob = 0.0
        self.num_tokens = 0
        # Of the prompt, where the call wants them, from the first events on.
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.has_reasoning = reasoning is not None
        self._has_tokens = has_tokens
        self._reasoning = reasoning
        self._tells_reasoning = tells_reasoning
        self._tools = tools
        self._echo = echo
        self._is_plain = reasoning is None and tools is None and not has_tokens
        self._reasonings: list[str] = []
        # All tokens, of a model whose reasoning can be told apart.
        self._all_token_ids: list[int] = []
        self._open_call: int | None = None
        self._has_calls = False

    def take(self, delta: TokenDelta) -> list[Event]:
        """What the model says now; nothing while it is not certain what it is."""
        if self.is_finished:
            return []
        self.cumulative_logprob = delta.cumulative_logprob
        self.num_tokens += delta.num_output_tokens or 0
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        events: list[Event] = []
        if self._echo:
            events.append(Text(self._echo))
            self._echo = ""
        if self._is_plain:
            if delta.text:
                events.append(Text(delta.text))
        else:
            self._take_marked(events, delta)
        if delta.finish_reason:
            events += self.finish(delta.finish_reason, delta.stop_reason)
        return events

    def take_text(self, values: Mapping[str, Any]) -> str:
        """The text of a response's `values`, if that is all that they say; else empty, and they are left to `take`."""
        text, num_new = values.get("text_output"), values.get("num_output_tokens")
        if not self._is_plain or self.is_finished or self._echo or num_new is None or type(text) is not str:
            return ""
        if values.get("finish_reason", b"") not in UNFINISHED:
            return ""
        if text:
            self.num_tokens += num_new
        return text

    def finish(self, reason: str, stop_reason: str | int | None = None) -> list[Event]:
        """Nothing follows."""
        events: list[Event] = []
        if self._reasoning is not None:
            self._note(events, self._reasoning.finish().events)
        if self._tools is not None:
            for event in self._tools.finish().events:
                self._add(events, event)
        self._end_call(events)
        self.is_finished = True
        events.append(Finish(reason, stop_reason, self._has_calls))
        return events

    @property
    def reasoning(self) -> str:
        """All reasoning so far, told or not."""
        return "".join(self._reasonings)

    def count_reasoning(self, start: Sequence[int], end: Sequence[int]) -> int | None:
        """How many tokens the reasoning is, by those of its tags; None if that cannot be told from tokens."""
        if self._reasoning is None or not self._all_token_ids:
            return None
        return self._reasoning.count(self._all_token_ids, start, end)

    def _take_marked(self, events: list[Event], delta: TokenDelta) -> None:
        """Of a model whose text has marks, or a call that wants tokens."""
        if self._reasoning is not None:
            self._all_token_ids += delta.token_ids or ()
            self._note(events, self._reasoning.push(delta.text).events)
        else:
            self._add_text(events, delta.text)
        if self._has_tokens and (delta.token_ids or delta.logprobs):
            events.append(Tokens(delta.token_ids or [], delta.logprobs or []))

    def _note(self, events: list[Event], found: Sequence[Event]) -> None:
        """Add reasoning, and what of the rest is text or calls."""
        for event in found:
            if isinstance(event, Reasoning):
                self._reasonings.append(event.text)
                if self._tells_reasoning:
                    self._add(events, event)
            elif isinstance(event, Text):
                self._add_text(events, event.text)
            else:
                self._add(events, event)

    def _add_text(self, events: list[Event], text: str) -> None:
        if self._tools is not None:
            for event in self._tools.push(text).events:
                self._add(events, event)
        elif text:
            self._add(events, Text(text))

    def _add(self, events: list[Event], event: Event) -> None:
        """Whatever is not more of the open call ends it."""
        index = event.index if isinstance(event, ToolDelta) else None
        if index != self._open_call:
            self._end_call(events)
            self._open_call = index
            self._has_calls = self._has_calls or index is not None
        events.append(event)

    def _end_call(self, events: list[Event]) -> None:
        if self._open_call is not None:
            events.append(ToolEnd(self._open_call))
            self._open_call = None


class Said:
    """What events of one choice say together, until it is written and forgotten."""

    __slots__ = ("_reasonings", "_texts", "calls", "finish", "logprobs", "token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self.calls: list[ToolDelta] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasonings)

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing to read: no text, no reasoning and no call."""
        return not (self._texts or self._reasonings or self.calls)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Text():
                    self._texts.append(event.text)
                case Reasoning():
                    self._reasonings.append(event.text)
                case ToolDelta():
                    self._add_call(event)
                case Tokens():
                    self.token_ids += event.ids
                    self.logprobs += event.logprobs
                case Finish():
                    self.finish = event

    def forget_tokens(self) -> None:
        self.token_ids, self.logprobs = [], []

    def forget_text(self) -> None:
        self._texts, self._reasonings, self.calls = [], [], []

    def _add_call(self, delta: ToolDelta) -> None:
        """One for each call: more arguments go to it."""
        for call in self.calls:
            if call.index == delta.index:
                call.arguments += delta.arguments
                return
        self.calls.append(ToolDelta(delta.index, delta.arguments, delta.id, delta.name))
