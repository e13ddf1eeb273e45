"""Guesses by a smaller network with the same vocabulary, which has KV blocks of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..blocks import BlockPool
from ..kv_cache import KvManager
from ..plan import Chunk, StepPlan
from ..sampling_params import SamplingParams
from ..sequence import Sequence as Generated

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..options import EngineOptions
    from ..runner import Runner
    from ..text.tokenizer import Tokenizer

_GREEDY = SamplingParams(temperature=0.0)
# Of the memory that is free when the draft model is loaded, which on a GPU is before the model that checks.
_KV_SHARE = 0.1


class DraftModel:
    """Its most probable tokens. Each sequence has a twin here: the same tokens, in other blocks, then the drafts.

    `vocab_size` is that of the network that checks. A step of the engine computes at most `most_tokens` here before it
    drafts: a longer prompt takes several steps, in which its sequence gets no drafts.
    """

    def __init__(self, runner: Runner, *, vocab_size: int, most_tokens: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._most_tokens = most_tokens
        self._kv = KvManager(BlockPool(runner.num_blocks), runner.block_size, is_prefix_caching=False)
        self._twins: dict[int, Generated] = {}

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        chunks: list[Chunk] = []
        drafting: list[tuple[Generated, Generated, int]] = []
        budget = self._most_tokens
        for sequence, num_drafts in wanted:
            twin = self._twin(sequence)
            size, start = len(twin.token_ids), twin.num_computed_tokens
            num_tokens = min(size - start, budget)
            end = size + num_drafts
            if not num_tokens or end > self._runner.max_model_len or not self._kv.extend(twin, end):
                continue
            budget -= num_tokens
            is_whole = start + num_tokens == size
            twin.num_computed_tokens += num_tokens
            chunks.append(Chunk(twin, start, num_tokens, int(is_whole)))
            if is_whole:
                drafting.append((sequence, twin, num_drafts))
        while chunks:
            sampled = self._runner.launch(StepPlan(tuple(chunks))).result().sampled
            chunks, left = [], []
            for (sequence, twin, num_drafts), (token,) in zip(drafting, sampled, strict=True):
                if token.token_id >= self._vocab_size:
                    continue
                sequence.drafts.append(token.token_id)
                twin.token_ids.append(token.token_id)
                if len(sequence.drafts) < num_drafts:
                    chunks.append(Chunk(twin, twin.num_computed_tokens, 1, 1))
                    twin.num_computed_tokens += 1
                    left.append((sequence, twin, num_drafts))
            drafting = left

    def _twin(self, sequence: Generated) -> Generated:
        """With the tokens of its sequence; what was drafted and is not among them is forgotten."""
        twin = self._twins.get(sequence.seq_id)
        token_ids = sequence.token_ids
        if twin is None:
            twin = Generated(sequence.seq_id, list(token_ids), len(token_ids), _GREEDY)
            self._twins[sequence.seq_id] = twin
            twin.slot = sequence.slot
            return twin
        twin.slot = sequence.slot
        # Drafts follow the tokens that both had when the last ones were drafted.
        same = twin.num_prompt_tokens
        while same < min(len(twin.token_ids), len(token_ids)) and twin.token_ids[same] == token_ids[same]:
            same += 1
        twin.token_ids[same:] = token_ids[same:]
        twin.num_prompt_tokens = len(token_ids)
        twin.num_computed_tokens = min(twin.num_computed_tokens, same, len(token_ids) - 1)
        return twin

    def end(self, sequence: Generated) -> None:
        twin = self._twins.pop(sequence.seq_id, None)
        if twin is not None:
            self._kv.free(twin)

    def close(self) -> None:
        self._runner.close()


def load_drafter(
    checkpoint: Checkpoint, options: EngineOptions, tokenizer: Callable[[], Tokenizer], *, is_gpu: bool
) -> Runner | None:
    """The runner of the draft model that `options` name, with blocks for all that run while there are drafts; or None.

    `checkpoint` and `tokenizer` are those of the model that checks. Raises ServerErrors that name the file or the
    option; UnsupportedError for a model whose drafts would mean other tokens, or cannot be taken back.
    """
    from ..checkpoint import open_checkpoint
    from ..checkpoint_place import longest_of
    from ..runner import load_runner
    from ..sampler import Sampler
    from ..text.tokenizer import Tokenizer

    config = options.speculative_config
    if config is None or config.method != "draft_model" or config.model is None:
        return None
    place = Path(config.model).expanduser()
    if not place.exists():
        raise InvalidArgumentError(f"speculative_config.model: there is no directory and no GGUF file {place}")
    with open_checkpoint(place) as drafting:
        if Tokenizer.from_checkpoint(drafting).pieces.tolist() != tokenizer().pieces.tolist():
            raise UnsupportedError(
                f"speculative_config.model {place}: its tokenizer differs from that of the model, so its drafts would "
                "mean other texts"
            )
        lengths = [
            length for length in (longest_of(drafting), options.max_model_len or longest_of(checkpoint)) if length
        ]
        chosen = replace(
            options,
            speculative_config=None,
            quantization=None,
            max_model_len=min(lengths, default=None),
            max_num_seqs=min(options.max_num_seqs, config.most_sequences(is_gpu=is_gpu)),
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=None,
            tensor_parallel_size=1,
            enable_chunked_prefill=True,
            enable_lora=False,
        )
        runner = load_runner(drafting, chosen, Sampler, kv_share=_KV_SHARE if is_gpu else 1.0)
    if runner.has_states:
        runner.close()
        raise UnsupportedError(
            f"speculative_config.model {place}: its layers keep states, and what a wrong draft has done to them cannot "
            "be undone"
        )
    return runner
