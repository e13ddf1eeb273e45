"""One continuation that the engine generates: its tokens, its blocks, its progress, and whether it stops."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .lora.adapter import Adapter
    from .pictures.prompt import PromptPictures
    from .speculation.prediction import Prediction


class FinishReason(enum.Enum):
    """Why a sequence ended, as the APIs say it."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # no blocks; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output in `token_ids`. The KV of the first `num_computed_tokens` of them lies in `block_ids`.

    `choice` numbers the sequences of a request with n > 1. `cache_salt` separates prefixes that must not be shared.
    `num_cached_tokens`: how many prompt tokens the prefix cache gave when the sequence was first admitted.
    `matcher` is the state of constrained decoding (`grammar/`), None without. `arrival` orders sequences.

    While a step is planned and runs, `num_computed_tokens` counts its chunk already (a chunk's own `start` says where
    it begins), and `num_placeholders` the tokens that are sampled but not read: the last known token is then not the
    last.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    choice: int = 0
    arrival: int = 0
    priority: int = 0
    cache_salt: str = ""
    # The seed of this sequence's noise: its tokens depend on it and their positions only, never on the batch.
    seed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    # Its slot among `max_num_seqs` while it runs, which holds the network's state of it.
    slot: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_placeholders: int = 0
    # The number of tokens at which it ends, by max_tokens or the model's length.
    max_num_tokens: int = 0
    # Its next token cannot be sampled before the host has read the last one (constrained decoding, penalties).
    is_host_bound: bool = False
    # The choice that computes the prompt of this request's other choices: its full blocks of the prompt are shared.
    source: Sequence | None = None
    # How many blocks the prefix cache knows.
    num_registered_blocks: int = 0
    # Of 64 bits, so that the tables of a step are joined and not converted.
    block_ids: array[int] = field(default_factory=partial(array, "q"))
    # One hash per full block of `token_ids`, chained (`block_hash`).
    block_hashes: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    # The stop string or token id that ended it; None for end-of-sequence or length.
    stop_reason: str | int | None = None
    matcher: Any = None
    # What adapters add for it, and the slot of the device where they are while it runs; -1 without.
    adapter: Adapter | None = None
    adapter_slot: int = -1
    # What of its prompt is picture.
    pictures: PromptPictures | None = None
    # The sampler's state of it: token counts, banned words (`sampler_state`).
    sampler_state: Any = None
    # Guesses of its next tokens, which its next step may check; how many are worth it, and where they come from
    # (`speculation/`).
    drafts: list[int] = field(default_factory=list)
    pace: Any = None
    token_index: Any = None
    # The answer that the client expects.
    prediction: Prediction | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


def find_stop(sequence: Sequence, token_id: int, eos_token_ids: AbstractSet[int]) -> FinishReason | None:
    """End of sequence, then stop tokens (which are the `stop_reason`), then length; before `min_tokens` length only."""
    params = sequence.params
    num_tokens = len(sequence.token_ids)
    if num_tokens - sequence.num_prompt_tokens >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token_id in params.stop_token_ids:
            sequence.stop_reason = token_id
            return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= sequence.max_num_tokens else None
