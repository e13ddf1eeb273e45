"""Guesses by a trained layer, which reads what the network has made of a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ..attention.own_memory import TextMemory
from ..sequence import Sequence as Generated
from .config import SpeculativeConfig

if TYPE_CHECKING:
    from ..models.draft_head import DraftHead
    from ..runner import Runner

# A sequence keeps the states of at least this many tokens, the last ones of a longer text, until it gets drafts; and of
# at most twice as many, so that few steps move what is kept.
_MOST_PENDING = 512


class _Text:
    """Of one sequence: what the layer keeps of its first tokens, and states of the tokens behind them that wait."""

    def __init__(self, first: int) -> None:
        self.memory = TextMemory(first)
        self._pending: list[torch.Tensor] = []
        self.num_pending = 0

    def take(self, start: int, states: torch.Tensor) -> None:
        """States of tokens from `start` on: those that were there from it on are forgotten."""
        end = self.memory.end
        behind = end + self.num_pending
        if not self.memory.first <= start <= behind:
            self._begin(start)  # there is a gap: nothing before it is seen
        elif start < end:
            self.memory.end, self._pending, self.num_pending = start, [], 0
        elif start < behind:
            self._pending = [torch.cat(self._pending)[: start - end]]
            self.num_pending = start - end
        self._pending.append(states)
        self.num_pending += len(states)
        if self.num_pending > 2 * _MOST_PENDING:
            start = self.memory.end + self.num_pending - _MOST_PENDING
            kept = torch.cat(self._pending)[-_MOST_PENDING:].clone()
            self._begin(start)
            self._pending, self.num_pending = [kept], len(kept)

    def pending(self, num_rows: int) -> torch.Tensor:
        """The first states that wait; none waits then."""
        states = torch.cat(self._pending)[:num_rows]
        self._pending, self.num_pending = [], 0
        return states

    def _begin(self, first: int) -> None:
        self.memory, self._pending, self.num_pending = TextMemory(first), [], 0


class TrainedProposer:
    """It gets the network's states by `take`, after each step, and drafts greedily for all sequences together.

    With more than `most_sequences` in a step nothing is drafted, and no states are kept.
    """

    def __init__(self, head: DraftHead, *, most_sequences: int) -> None:
        self._head = head
        self._most_sequences = most_sequences
        self._texts: dict[int, _Text] = {}

    @classmethod
    def of(cls, head: DraftHead, config: SpeculativeConfig, runner: Runner) -> TrainedProposer:
        """It gets the states of all steps of the runner from now on."""
        proposer = cls(head, most_sequences=config.most_sequences(is_gpu=runner.is_asynchronous))
        runner.tap(head.layers, proposer.take)
        return proposer

    def take(
        self, sequences: Sequence[Generated], starts: Sequence[int], counts: Sequence[int], states: torch.Tensor
    ) -> None:
        """The states [rows, layers x width] of a step: of each sequence those of tokens from its start on."""
        if len(sequences) > self._most_sequences:
            self._texts.clear()
            return
        for sequence, start, part in zip(sequences, starts, states.split(list(counts)), strict=True):
            text = self._texts.setdefault(sequence.seq_id, _Text(start))
            # A view of a few rows would keep the states of the whole step.
            text.take(start, part if len(sequences) == 1 else part.clone())

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        head = self._head
        drafting: list[tuple[Generated, int, TextMemory]] = []
        following: list[int] = []
        states: list[torch.Tensor] = []
        counts: list[int] = []
        for sequence, num_drafts in wanted:
            text = self._texts.get(sequence.seq_id)
            if text is None:
                continue
            memory = text.memory
            # The last token has no states yet; what was computed of drafts that were wrong is left out.
            num_rows = min(text.num_pending, len(sequence.token_ids) - 1 - memory.end)
            if num_rows < 1:
                continue
            following += sequence.token_ids[memory.end + 1 : memory.end + 1 + num_rows]
            states.append(text.pending(num_rows))
            counts.append(num_rows)
            drafting.append((sequence, num_drafts, memory))
        if not drafting:
            return
        with torch.inference_mode():
            memories = [memory for _, _, memory in drafting]
            hidden = head(following, head.read(torch.cat(states)), list(zip(memories, counts, strict=True)))
            hidden = hidden[[end - 1 for end in accumulate(counts)]]
            ends = [memory.end for memory in memories]
            while True:
                for (sequence, _, _), token in zip(drafting, head.tokens(hidden), strict=True):
                    sequence.drafts.append(token)
                going = [
                    row
                    for row, (sequence, num_drafts, memory) in enumerate(drafting)
                    if len(sequence.drafts) < num_drafts and memory.end < head.max_len
                ]
                if not going:
                    break
                if len(going) < len(drafting):
                    drafting, hidden = [drafting[row] for row in going], hidden[going]
                last = [sequence.drafts[-1] for sequence, _, _ in drafting]
                hidden = head(last, head.fed(hidden), [(memory, 1) for _, _, memory in drafting])
            for memory, end in zip(memories, ends, strict=True):
                memory.end = end

    def end(self, sequence: Generated) -> None:
        self._texts.pop(sequence.seq_id, None)

    def close(self) -> None:
        self._texts.clear()
