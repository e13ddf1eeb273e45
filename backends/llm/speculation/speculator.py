"""Who gets drafts in the next step, and how many: as many as the texts so far were guessed well.

Whatever is drafted, texts stay the same: the sampler draws the token of each position as it would without drafts, with
the position's own noise, and a draft only saves a step if it is that token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..admission import is_host_bound
from ..engine_statistics import SpeculationStatistics
from ..grammar.matcher import accepted_prefix
from ..plan import SampledToken, StepPlan
from ..sequence import Sequence as Generated
from .config import PREDICTED, TRAINED, SpeculativeConfig
from .draft_model import DraftModel
from .lookup import NgramProposer, Proposer, SuffixProposer

if TYPE_CHECKING:
    from ..options import EngineOptions
    from ..runner import Runner

# The first number of drafts. It doubles while all of them are right.
_FIRST_DRAFTS = 2
# Steps without drafts after drafts of which none was right: one, then twice as many each time, up to this.
_MOST_WAIT = 64
# One step in this number has no drafts, to be compared with.
_PLAIN_EVERY = 64
# Of a running mean, the least weight of a new value.
_NEW_SHARE = 0.1
# Steps with drafts before they are judged, and a step's time in plain steps that counts at most.
_LEAST_STEPS = 8
_MOST_TIMES = 8.0
# Steps without drafts where drafts do not pay.
_FIRST_REST = 64
_MOST_REST = 2048


@dataclass(slots=True)
class Pace:
    """How many drafts one sequence gets. Right guesses raise it at once; wrong ones make it wait longer and longer, so
    that a text that cannot be guessed costs a few wider steps."""

    num_drafts: int
    most: int
    wait: int = 0
    num_failures: int = 0

    def next(self) -> int:
        if self.wait:
            self.wait -= 1
            return 0
        return self.num_drafts

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        if num_accepted == num_drafts:
            self.num_drafts = min(self.most, max(self.num_drafts, 2 * num_drafts))
            self.num_failures = 0
        elif num_accepted:
            self.num_drafts = min(self.most, 1 + num_accepted)
            self.num_failures = 0
        else:
            self.num_drafts = min(self.most, _FIRST_DRAFTS)
            self.num_failures += 1
            self.wait = min(_MOST_WAIT, 1 << self.num_failures)


@dataclass(slots=True)
class _Speed:
    """Running means of steps: seconds, and tokens that a sequence got."""

    seconds: float = 0.0
    tokens: float = 0.0
    num_steps: int = 0

    def observe(self, seconds: float, tokens: float) -> None:
        self.num_steps += 1
        share = max(_NEW_SHARE, 1 / self.num_steps)
        self.seconds += share * (seconds - self.seconds)
        self.tokens += share * (tokens - self.tokens)


class Gain:
    """Whether drafts pay on this machine: steps with drafts are compared with steps of as many sequences without.

    Where they give tokens more slowly, there are no drafts for a number of steps, which doubles each time.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Speed] = {}
        self._drafted: dict[int, _Speed] = {}
        self._num_steps = 0
        self._rest = 0
        self._next_rest = _FIRST_REST

    def is_expected(self) -> bool:
        """Now and then not, so that there is something to compare with."""
        self._num_steps += 1
        if self._rest:
            self._rest -= 1
            return False
        return self._num_steps % _PLAIN_EVERY != 0

    def observe(self, num_sequences: int, seconds: float, tokens: float, *, has_drafts: bool) -> None:
        """A step of sequences that all decode, with the mean of the tokens that they got."""
        plain = self._plain.setdefault(num_sequences, _Speed())
        if not has_drafts:
            plain.observe(seconds, tokens)
            return
        drafted = self._drafted.setdefault(num_sequences, _Speed())
        # What a draft model does once for a prompt says nothing of steps.
        drafted.observe(min(seconds, _MOST_TIMES * plain.seconds) if plain.num_steps else seconds, tokens)
        if drafted.num_steps < _LEAST_STEPS or not plain.num_steps:
            return
        if drafted.seconds > plain.seconds * drafted.tokens:
            del self._drafted[num_sequences]
            self._rest, self._next_rest = self._next_rest, min(_MOST_REST, 2 * self._next_rest)
        elif drafted.num_steps >= 4 * _LEAST_STEPS:
            self._next_rest = _FIRST_REST


class Speculator:
    """Called from the engine's thread: `draft` before each plan, `observe` with its result.

    Without a `proposer` only sequences whose client has sent a prediction get drafts. `most_sequences`: with more of
    them running, no sequence gets drafts, because such a step costs what it computes.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer | None,
        *,
        most_sequences: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._config = config
        self._proposer = proposer
        self._most_sequences = most_sequences
        self._most_rows = 1 + most_sequences + config.num_speculative_tokens
        self._clock_ns = clock_ns
        self._gain = Gain()
        self._began_ns = 0
        self._is_on = True
        self.statistics = SpeculationStatistics(config.num_speculative_tokens)

    def draft(self, running: Sequence[Generated]) -> None:
        """Set `drafts` of the sequences that run."""
        self._began_ns = self._clock_ns()
        if len(running) > self._most_sequences:
            if self._is_on:
                self._pause(running)
            return
        self._is_on = True
        is_expected = self._gain.is_expected()
        wanted: list[tuple[Generated, int]] = []
        # What a step may check in all, shared evenly.
        most = (self._most_rows - len(running)) // max(1, len(running))
        for sequence in running:
            if self._proposer is None and sequence.prediction is None:
                continue
            sequence.is_host_bound = True  # its next drafts depend on its last token
            if sequence.num_placeholders:
                continue
            sequence.drafts = []
            if (
                is_expected
                and sequence.num_computed_tokens == len(sequence.token_ids) - 1 >= sequence.num_prompt_tokens
            ):
                num_drafts = min(most, self._pace(sequence).next())
                if num_drafts:
                    wanted.append((sequence, num_drafts))
        if wanted:
            self._propose(wanted)

    def _pause(self, running: Sequence[Generated]) -> None:
        """From now on sequences are computed as if nothing were speculated, once their drafts have been checked."""
        self._is_on = False
        for sequence in running:
            if sequence.num_placeholders > 1:  # how many tokens it gets is not known yet
                self._is_on = True
                continue
            sequence.is_host_bound = is_host_bound(sequence.params)
            sequence.drafts = []

    def _propose(self, wanted: list[tuple[Generated, int]]) -> None:
        guessed: list[tuple[Generated, int]] = []
        unpredicted: list[tuple[Generated, int]] = []
        for sequence, num_drafts in wanted:
            if sequence.matcher is not None:
                sequence.drafts = sequence.matcher.forced(num_drafts)
            if sequence.drafts:
                continue
            guessed.append((sequence, num_drafts))
            if sequence.prediction is not None:
                sequence.drafts = sequence.prediction.propose(
                    sequence.token_ids, num_prompt_tokens=sequence.num_prompt_tokens, num_drafts=num_drafts
                )
            if not sequence.drafts:
                unpredicted.append((sequence, num_drafts))
        if unpredicted and self._proposer is not None:
            self._proposer.propose(unpredicted)
        for sequence, _ in guessed:
            if sequence.matcher is not None and sequence.drafts:
                sequence.drafts = accepted_prefix(sequence.matcher, sequence.drafts)

    def _pace(self, sequence: Generated) -> Pace:
        pace: Pace | None = sequence.pace
        if pace is None:
            most = self._config.num_speculative_tokens
            pace = sequence.pace = Pace(min(most, _FIRST_DRAFTS), most)
        return pace

    def observe(self, plan: StepPlan, sampled: Iterable[tuple[SampledToken, ...]]) -> None:
        """Learn which drafts were right."""
        chunks = [chunk for chunk in plan.chunks if chunk.num_sampled]
        results = list(sampled)
        if 0 < len(plan.chunks) <= self._most_sequences and all(
            chunk.num_tokens == chunk.num_sampled for chunk in plan.chunks
        ):
            num_tokens = sum(map(len, results))
            self._gain.observe(
                len(chunks),
                (self._clock_ns() - self._began_ns) / 1e9,
                num_tokens / len(chunks),
                has_drafts=plan.num_tokens > len(chunks),
            )
        for chunk, tokens in zip(chunks, results, strict=True):
            if chunk.num_sampled > 1:
                sequence, num_drafts = chunk.sequence, chunk.num_sampled - 1
                drafts = sequence.drafts[:num_drafts]
                num_accepted = sum(token.token_id == draft for token, draft in zip(tokens, drafts, strict=False))
                self._pace(sequence).observe(num_drafts, num_accepted)
                if sequence.prediction is not None:
                    sequence.prediction.observe(num_drafts, num_accepted)
                self.statistics.observe(num_drafts, num_accepted)

    def end(self, sequence: Generated) -> None:
        if self._proposer is not None:
            self._proposer.end(sequence)

    def close(self) -> None:
        if self._proposer is not None:
            self._proposer.close()


def make_speculator(
    runner: Runner, options: EngineOptions, drafter: Runner | None, clock_ns: Callable[[], int]
) -> Speculator | None:
    """None where no option asks for it.

    `drafter` runs the draft model, if that is asked for.
    """
    config = options.speculative_config
    if config is None:
        return None
    proposer: Proposer
    if config.method in TRAINED:
        from .eagle import load_eagle
        from .trained import TrainedProposer

        head = runner.draft_head if config.method == "mtp" else load_eagle(config, runner)
        assert head is not None, "the network was loaded with its layer for prediction"
        proposer = TrainedProposer.of(head, config, runner)
    elif drafter is not None:
        proposer = DraftModel(drafter, vocab_size=runner.vocab_size, most_tokens=options.max_num_batched_tokens)
    else:
        proposer = NgramProposer(config) if config.method == "ngram" else SuffixProposer(config)
    most_sequences = config.most_sequences(is_gpu=runner.is_asynchronous)
    return Speculator(config, proposer, most_sequences=most_sequences, clock_ns=clock_ns)


def make_predicting(runner: Runner, clock_ns: Callable[[], int]) -> Speculator | None:
    """For an engine that speculates only where a client predicts the answer; None for a model whose layers
    keep states: without `speculative_config` there is no memory for those behind drafts."""
    if runner.has_states:
        return None
    most_sequences = PREDICTED.most_sequences(is_gpu=runner.is_asynchronous)
    return Speculator(PREDICTED, None, most_sequences=most_sequences, clock_ns=clock_ns)
