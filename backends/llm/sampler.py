"""From logits to tokens, in vLLM's order.

Raw log-probabilities; structured output; allowed ids; bad words; min_tokens and logit bias; penalties and DRY; the
samplers of llama.cpp, in its own order (`samplers`); greedy rows take the maximum; temperature; min_p; top_k and top_p;
a draw. A row's token depends on its logits, its sequence's parameters, seed and position, and on nothing else in the
batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .attention.paged import copied_together
from .draw import DrawColumns, draw_columns, draw_on_device, draw_on_host, uniform, uniforms
from .grammar.matcher import allowed_mask, fill_masks
from .plan import SampledToken, TokenLogprobs
from .sampler_state import SamplerState, apply_rules, forbid_on_device, forbid_on_host

if TYPE_CHECKING:
    from .sampling_params import SamplingParams
    from .sequence import Sequence
    from .text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of rows, still on the device: the tokens' own with their ranks, and the best `num_top`."""

    logprobs: torch.Tensor  # float32 [rows]
    ranks: torch.Tensor  # int64 [rows]
    top_logprobs: torch.Tensor  # float32 [rows, max(num_top)]
    top_token_ids: torch.Tensor  # int64 [rows, max(num_top)]
    num_top: tuple[int, ...]

    def read(self) -> list[TokenLogprobs]:
        logprobs, ranks = self.logprobs.tolist(), self.ranks.tolist()
        top_logprobs, top_token_ids = self.top_logprobs.tolist(), self.top_token_ids.tolist()
        return [
            TokenLogprobs(
                logprobs[row], ranks[row], tuple(zip(top_token_ids[row][:num], top_logprobs[row], strict=False))
            )
            for row, num in enumerate(self.num_top)
        ]


def rank_tokens(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Rows[int]) -> LogprobRows:
    """`logits` float32 [rows, vocabulary], a token id and a number of alternatives per row.

    A rank is one more than the number of tokens that are strictly more probable.
    """
    counts = tuple(min(num, logits.shape[1]) for num in num_top)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    norms = logits.logsumexp(dim=-1, keepdim=True)
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(max(counts, default=0), dim=-1)
    return LogprobRows((chosen - norms).squeeze(1), ranks, top.values - norms, top.indices, counts)


# Rows of a prompt whose log-probabilities are computed at once: bounds what the copies of the logits take.
_PROMPT_ROWS = 256


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Tokens of a step, int64 [rows] on the device that holds the logits; `read` waits for them."""

    token_ids: torch.Tensor
    logprob_rows: tuple[int, ...] = ()
    logprobs: LogprobRows | None = None

    def read(self) -> list[SampledToken]:
        sampled = [SampledToken(token_id) for token_id in self.token_ids.tolist()]
        if self.logprobs is not None:
            for row, logprobs in zip(self.logprob_rows, self.logprobs.read(), strict=True):
                sampled[row] = SampledToken(sampled[row].token_id, logprobs)
        return sampled


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """Tokens of a step with drafts: of the rows `places` those of `sampled`, and by their first row those that were
    verified `alone`. `token_ids` int64 [rows] has the former; rows behind a wrong draft have tokens without meaning."""

    token_ids: torch.Tensor
    places: list[int]
    sampled: SampledRows | None
    alone: dict[int, list[SampledToken]]

    def read(self) -> list[SampledToken]:
        tokens = [SampledToken(-1)] * len(self.token_ids)
        for place, token in zip(self.places, () if self.sampled is None else self.sampled.read(), strict=True):
            tokens[place] = token
        for first, verified in self.alone.items():
            tokens[first : first + len(verified)] = verified
        return tokens


class Sampler:
    """Draws tokens. It holds only constants; the state of a sequence is in `Sequence.sampler_state`."""

    def __init__(self, *, eos_token_ids: Iterable[int] = (), tokenizer: Tokenizer | None = None) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer

    def sample(
        self, logits: torch.Tensor, sequences: Rows[Sequence], positions: Rows[int] | None = None
    ) -> list[SampledToken]:
        """A token for each row of logits [rows, vocabulary], which belong to `sequences` in this order.

        The logits may be changed. `positions`: the index that each new token will have; by default the number of
        tokens of its sequence, which is wrong for sequences whose last tokens have not been read yet.
        """
        return self.start(logits, sequences, positions).read()

    def draws(self, sequences: Rows[Sequence], positions: Rows[int]) -> DrawColumns | None:
        """What `start` needs on a device besides logits, as it depends on none; None if all rows take the greatest."""
        params = [self._state(sequence).drawn for sequence in sequences]
        if all(one.is_greedy for one in params):
            return None
        return draw_columns(params, uniforms([sequence.seed for sequence in sequences], positions))

    def start(
        self,
        logits: torch.Tensor,
        sequences: Rows[Sequence],
        positions: Rows[int] | None = None,
        draws: torch.Tensor | None = None,
    ) -> SampledRows:
        """The same without waiting for a device, which may have the `draws` of these rows already."""
        assert len(logits) == len(sequences), f"{len(logits)} rows of logits for {len(sequences)} sequences"
        logits = logits.float()
        if positions is None:
            positions = [sequence.num_tokens for sequence in sequences]
        states = [self._state(sequence) for sequence in sequences]
        wanted = tuple(row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None)
        is_edited = any(
            state.is_edited or sequence.matcher is not None for state, sequence in zip(states, sequences, strict=True)
        )
        raw, index = logits, None
        if wanted and len(wanted) < len(sequences):
            (index,) = copied_together([np.array(wanted, dtype=np.int64)], logits.device)
            raw = logits[index]
        elif wanted and is_edited:
            raw = logits.clone()
        if any(state.is_edited for state in states):
            logits = logits.contiguous()
            apply_rules(logits, sequences, states, positions)
        token_ids = self._choose(logits, sequences, positions, [state.drawn for state in states], draws)
        if not wanted:
            return SampledRows(token_ids)
        num_top = [sequences[row].params.logprobs or 0 for row in wanted]
        chosen = token_ids if index is None else token_ids[index]
        return SampledRows(token_ids, wanted, rank_tokens(raw, chosen, num_top))

    def verify(self, logits: torch.Tensor, sequence: Sequence, position: int, drafts: Rows[int]) -> list[SampledToken]:
        """The tokens behind a sequence's last token and behind its drafts, up to the first that is not the draft there.

        `logits` [1 + drafts, vocabulary] may be changed; the first token will be at `position`. Each token is drawn as
        in a step of its own, where the ones before it are known: rules, grammar and samplers see them.
        """
        tokens: list[SampledToken] = []
        matcher, known = sequence.matcher, sequence.token_ids
        num_known, num_matched = len(known), 0
        try:
            for row in range(len(logits)):
                tokens += self.sample(logits[row : row + 1], [sequence], [position + row])
                token_id = tokens[-1].token_id
                if row == len(drafts) or token_id != drafts[row]:
                    break
                known.append(token_id)
                if matcher is not None:
                    # A token that ends the text may not be one that the grammar takes.
                    if not matcher.accept(token_id):
                        break
                    num_matched += 1
                    if matcher.is_terminated:
                        break
        finally:
            del known[num_known:]
            if num_matched:
                matcher.rollback(num_matched)
        return tokens

    def has_rules(self, sequence: Sequence) -> bool:
        """Whether a token of a sequence depends on more than its logits, its position, and parameters of the draw."""
        return sequence.matcher is not None or self._state(sequence).is_edited

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: Rows[int], num_top: int) -> list[TokenLogprobs]:
        """Of the tokens that follow the positions of these rows of logits [rows, vocabulary]."""
        ranked: list[TokenLogprobs] = []
        for start in range(0, len(token_ids), _PROMPT_ROWS):
            part = logits[start : start + _PROMPT_ROWS].float()
            following = torch.tensor(token_ids[start : start + _PROMPT_ROWS], device=logits.device)
            ranked.extend(rank_tokens(part, following, [num_top] * len(part)).read())
        return ranked

    def _state(self, sequence: Sequence) -> SamplerState:
        state = sequence.sampler_state
        if state is None:
            state = sequence.sampler_state = SamplerState(sequence, self._eos_token_ids, self._tokenizer)
        return state  # type: ignore[no-any-return]  # the sequence does not know the sampler's class

    def _choose(
        self,
        logits: torch.Tensor,
        sequences: Rows[Sequence],
        positions: Rows[int],
        params: Rows[SamplingParams],
        draws: torch.Tensor | None,
    ) -> torch.Tensor:
        if logits.device.type == "cpu":
            return _choose_on_host(logits, sequences, positions, params)
        bound = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        if bound:
            forbid_on_device(logits, bound, fill_masks([sequences[row].matcher for row in bound]))
        if draws is None:
            columns = self.draws(sequences, positions)
            if columns is None:
                return logits.argmax(dim=-1)
            draws = torch.from_numpy(columns).pin_memory().to(logits.device, non_blocking=True)
        return draw_on_device(logits, draws)


def _choose_on_host(
    logits: torch.Tensor, sequences: Rows[Sequence], positions: Rows[int], params: Rows[SamplingParams]
) -> torch.Tensor:
    rows = logits.numpy()
    if all(sequence.params.is_greedy and sequence.matcher is None for sequence in sequences):
        return torch.from_numpy(rows.argmax(axis=-1))
    chosen = np.empty(len(sequences), dtype=np.int64)
    for row, (sequence, position, drawn) in enumerate(zip(sequences, positions, params, strict=True)):
        if sequence.matcher is not None:
            chosen[row] = _choose_matching(logits[row], sequence, position, drawn)
        elif drawn.is_greedy:
            chosen[row] = rows[row].argmax()
        else:
            chosen[row] = draw_on_host(rows[row], drawn, uniform(sequence.seed, position))
    return torch.from_numpy(chosen)


def _choose_matching(logits: torch.Tensor, sequence: Sequence, position: int, params: SamplingParams) -> int:
    """A token that the sequence's grammar accepts.

    Most are accepted as they come, and then the mask of all tokens is not needed: the greatest logit that is accepted
    is the greatest of those that are, and a draw that is repeated among the accepted when it is refused has the
    distribution of a draw among the accepted. That does not hold with top_k, top_p or min_p, which look at the others.
    """
    matcher = sequence.matcher
    is_plain = params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0
    if params.is_greedy or is_plain:
        token_id = _choose_one(logits, sequence, position, params, draw=0)
        if matcher.accepts(token_id):
            return token_id
    forbid_on_host(logits, allowed_mask(matcher))
    return _choose_one(logits, sequence, position, params, draw=1)


def _choose_one(logits: torch.Tensor, sequence: Sequence, position: int, params: SamplingParams, draw: int) -> int:
    row = logits.numpy()
    if params.is_greedy:
        return int(row.argmax())
    return draw_on_host(row, params, uniform(sequence.seed, position, draw))
