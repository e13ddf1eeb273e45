"""Computes the steps that the scheduler plans: from sequences to tensors, through the network, to sampled tokens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

from modelserver.backend import UnavailableError, UnsupportedError, give_back, use_huge_pages

from .attention.choose import make_attention
from .attention.chunked import make_sdpa
from .attention.kv_blocks import KvBlocks
from .attention.paged import IntArray, PagedAttention
from .attention.picture_attention import PictureAttention
from .block_tables import BlockTables, DeviceTables, bring_step, device_tables
from .captured_decode import CapturedDecode, Ending, captured_decode
from .captured_pieces import CapturedPieces, captured_pieces
from .checkpoint import Checkpoint
from .compute_thread import ComputeThread, choose_num_threads
from .cuda_graphs import CudaGraphs, can_capture
from .draw import DrawColumns
from .embedding.head import EmbeddingHead, load_head
from .kv_memory import choose_block_size, reserve_adapters, reserve_kv_memory, reserve_states, sized_for
from .lora.layers import AdaptedLayers
from .lora.registry import with_lora_rank
from .lora.step import EMBEDDING_SLOT, StepAdapters
from .models.load import LoadedNetwork, choose_device, load_network
from .options import EngineOptions
from .pictures.step import StepPictures, take_pictures
from .plan import SampledToken, StepPlan, StepResult, TokenLogprobs
from .profile import CudaMemory, Memory, StepMemory, drafting_bytes, largest_plan, picture_bytes
from .rank_messages import Pool
from .sampler import SampledRows, VerifiedRows
from .sequence import Sequence as TokenSequence
from .step_context import StepContext, Taps, compute_fresh
from .step_inputs import StepInputs
from .tensor_parallel import Followers, rank_options

if TYPE_CHECKING:
    from .lora.adapter import Adapter
    from .models.decoder import Decoder
    from .models.transformers_model import TransformersNetwork
    from .quantization.scheme import Scheme
    from .sampler import Sampler

logger = logging.getLogger(__name__)

# Rows whose logits are made at once for prompt log-probabilities: bounds memory at large vocabularies.
_PROMPT_ROWS = 256
# Called with the sequences of a step, where the rows of each begin, how many they are, and the states of all rows.
TakeStates = Callable[[Sequence[TokenSequence], Sequence[int], Sequence[int], torch.Tensor], None]
# What a step has sampled.
Sampled = SampledRows | VerifiedRows
_NO_ROWS = np.empty(0, dtype=np.int64)
# Weights that take long to read in small pages.
_MANY_BYTES = 64 << 20
_MIB = 1 << 20
# `SampledToken(...)` in half the time, for the loop over all that decode.
_new_tuple = tuple.__new__
# Memory that loading has used and freed, which is returned to the system before the first request.
_MUCH_LEFT_BYTES = 4 << 20


class Launched:
    """A step under way; on a CPU it has been computed already."""

    def __init__(self, result: Callable[[], StepResult]) -> None:
        self._result = result

    def result(self) -> StepResult:
        """Waits for the step."""
        return self._result()


class Runner:
    """Owns the network and the memory of its KV blocks; called from the engine's thread.

    `num_blocks` counts block 0, which no sequence gets: padding reads it. `window`: no layer looks further back than
    this many tokens. `is_asynchronous`: a step may be launched before the tokens of the one before are read. `tables`:
    where attention on a device takes block tables from; None where each step brings its own.
    """

    def __init__(
        self,
        loaded: LoadedNetwork,
        *,
        sampler: Sampler,
        head: EmbeddingHead,
        blocks: KvBlocks,
        attention: PagedAttention,
        is_asynchronous: bool,
        tables: DeviceTables | None = None,
        captured: CapturedDecode | None = None,
        pieces: CapturedPieces | None = None,
        followers: Followers | None = None,
        num_threads: int | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.blocks = blocks
        self.num_blocks = blocks.num_blocks
        self.block_size = blocks.block_size
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.is_asynchronous = is_asynchronous
        self.window = loaded.attention.window
        self.has_states = loaded.states is not None
        self.head = head
        self.tower = loaded.tower
        self._device = blocks.device
        self._network = loaded.network
        self._sampler = sampler
        self._attention = attention
        self._fresh_attention = make_sdpa(blocks, loaded.attention)
        self._picture_attention = _make_picture_attention(loaded, attention, blocks)
        self._captured = captured
        self._pieces = pieces
        self._followers = followers
        self._states = loaded.states
        self.adapters = loaded.adapted
        self.target = loaded.target
        self.draft_head = loaded.draft_head
        self._taps: tuple[frozenset[int], TakeStates] | None = None
        self._tables = BlockTables(is_windowed=self.window is not None)
        self._device_tables = tables
        self._thread = ComputeThread(self._device, num_threads)
        self._close = close
        # The step before: its sampled tokens, on the device, and by the slot of each sequence its row in them.
        self._last_token_ids: torch.Tensor | None = None
        self._last_rows = np.zeros(1, dtype=np.int64)

    def launch(self, plan: StepPlan) -> Launched:
        """Start a step; the one before may still run, and its tokens need not have been read."""
        if self._followers is None:
            return self._launch(plan)
        self._followers.begin_step()
        try:
            return self._launch(plan)
        except BaseException:
            self._followers.end_step()
            raise

    def _launch(self, plan: StepPlan) -> Launched:
        self._thread.settle()
        with torch.inference_mode():
            step = StepInputs(plan.chunks, self.block_size, has_adapters=self.adapters is not None, tables=self._tables)
            adapters = None
            if self.adapters is not None and step.adapter_slots:
                for sequence in step.sequences:
                    if sequence.adapter is not None:
                        self._place(self.adapters, sequence.adapter_slot, sequence.adapter)
                adapters = self.adapters.step(step.adapter_slots, step.adapter_bounds)
            pictures = None if self.tower is None else take_pictures(step, self._device)
            is_plain = pictures is None and step.rope_positions.ndim == 1 and not step.scored
            is_plain = is_plain and (adapters is None or not adapters.has_gains)
            unread = self._unread(step)
            ran = None
            if self._captured is not None and is_plain and self._taps is None and self._captured.can_run(step):
                ran = self._captured.run(step, unread, self._last_token_ids, lambda: self._draws(step))
            if ran is not None:
                prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
                sampled: Sampled | None = self._sample_captured(step, *ran)
            else:
                hidden, chosen, draws = self._compute(step, unread, pictures, adapters)
                prompt_logprobs = self._prompt_logprobs(step, hidden)
                sampled = self._sample(step, chosen, self._network.logits, draws)
            self._note_rows(step)
            self._last_token_ids = None if sampled is None else sampled.token_ids
            if sampled is None and self._followers is not None and self._device.type == "cuda":
                # Nothing will be read of this step, and the other ranks must have read theirs before the next.
                torch.cuda.current_stream().synchronize()
            read = _reader(sampled)
            if self._states is not None and step.drafts:
                tokens = read()  # the next step begins with the states behind those that are right
                read = partial(list, tokens)
                for chunk, kept in zip(step.sampled, _by_chunk(step, tokens), strict=True):
                    self._states.accept(chunk.sequence.slot, len(kept) - 1)
        return Launched(lambda: self._result(step, read, prompt_logprobs))

    def _result(
        self,
        step: StepInputs,
        read: Callable[[], Sequence[SampledToken]],
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]],
    ) -> StepResult:
        try:
            tokens = read()
        finally:
            if self._followers is not None:
                self._followers.end_step()
        self.check()
        return StepResult(_by_chunk(step, tokens), prompt_logprobs)

    @property
    def is_lost(self) -> bool:
        """Whether a rank has ended or hangs, so that no step can succeed any more."""
        return self._followers is not None and self._followers.lost is not None

    def check(self) -> None:
        """Raises InternalError, which says why, if no step can succeed any more."""
        if self._followers is not None:
            self._followers.check()

    @property
    def network(self) -> Decoder | TransformersNetwork:
        return self._network

    @property
    def _graphs(self) -> list[CapturedDecode | CapturedPieces]:
        """Of all kinds of steps, in the order in which they are captured."""
        return [graphs for graphs in (self._pieces, self._captured) if graphs is not None]

    def tap(self, layers: Sequence[int], take: TakeStates) -> None:
        """Give `take` the states before these layers of each step from now on. All steps are graphs in pieces then."""
        self._taps = frozenset(layers), take
        if self._pieces is not None:
            self._thread.settle()
            with torch.inference_mode():
                self._pieces.tap(self._taps[0])

    def embed(
        self, token_id_lists: Sequence[Sequence[int]], adapter: Adapter | None = None
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """One vector [size] per list, pooled as the checkpoint says: its last hidden state, if that says nothing.

        Computed in one pass, unless layers keep states; nothing is cached. Not normalised to unit length. `adapter` is
        that of all lists.
        """
        with ExitStack() as step, torch.inference_mode():
            self._thread.settle()
            if self._followers is not None:
                self._followers.begin_step()
                step.callback(self._followers.end_step)
            if self.adapters is not None and adapter is not None:
                self._place(self.adapters, EMBEDDING_SLOT, adapter)
            if self._followers is not None:
                self._followers.embed(token_id_lists, has_adapter=adapter is not None)
            # Each by itself: side by side they would be padded to the longest.
            vectors = [
                self.head(hidden[None], torch.tensor([len(hidden)], device=self._device))
                for hidden in self._fresh(token_id_lists, adapter)
            ]
            found = list(torch.cat(vectors).cpu().numpy())
        self.check()
        return found

    def capture_all(self) -> None:
        """Capture the graphs of all steps, where steps are graphs, so that no request waits for one."""
        self._thread.settle()
        with torch.inference_mode():
            for graphs in self._graphs:
                graphs.capture_all()

    def measure_memory(self, options: EngineOptions, memory: Memory) -> StepMemory:
        """What the largest step and `capture_all` take of the device; the pool may be of one block."""
        pieces, self._pieces = self._pieces, None  # the step is larger without them
        if self._followers is not None:
            self._followers.measure("step")
        memory.begin()
        self.launch(largest_plan(options, self.block_size, self.max_model_len)).result()
        step = memory.peak()
        if self._followers is not None:
            self._followers.measure("graphs")
        self._pieces = pieces
        self._thread.settle()
        with torch.inference_mode():
            return StepMemory(step, sum([graphs.measure(memory.used) for graphs in self._graphs]))

    def close(self) -> None:
        """Give back what the runner holds beyond its own memory: its share of the device's budget, other processes."""
        if self._followers is not None:
            self._followers.close()
        if self._close is not None:
            self._close()

    def _place(self, adapters: AdaptedLayers, slot: int, adapter: Adapter) -> None:
        """On all ranks."""
        if adapters.place(slot, adapter) and self._followers is not None:
            self._followers.place(slot, adapter)

    def _fresh(self, token_id_lists: Sequence[Sequence[int]], adapter: Adapter | None) -> list[torch.Tensor]:
        """Hidden states [tokens, hidden_size] of each list; layers that keep states have them of one at a time."""
        adapters = None
        if self.adapters is not None and adapter is not None:
            adapters = self.adapters.step([EMBEDDING_SLOT], [0, sum(map(len, token_id_lists))])
        if self._states is None:
            return list(
                compute_fresh(self._network, self._fresh_attention, token_id_lists, self._device, adapters=adapters)
            )
        found: list[torch.Tensor] = []
        for token_ids in token_id_lists:
            groups = self._states.group_alone(len(token_ids))
            found += compute_fresh(self._network, self._fresh_attention, [token_ids], self._device, state_groups=groups)
        return found

    def _compute(
        self, step: StepInputs, unread: IntArray, pictures: StepPictures | None, adapters: StepAdapters | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states of all rows, and of those that are sampled, in the order of the plan, and what draws of these
        need."""
        size = 0
        is_plain = pictures is None and step.rope_positions.ndim == 1 and (adapters is None or not adapters.has_gains)
        if self._pieces is not None and is_plain:
            size = self._pieces.size_for(len(step.input_ids), adapters is not None)
        change = None if self._device_tables is None else self._device_tables.take(step.tables, step.table_rows)
        if self._followers is not None:
            self._followers.step(step, size, change)
        drawn = None if self._device.type == "cpu" else self._draws(step)
        pieces = self._pieces if size else None
        tile_words = _NO_ROWS
        if adapters is not None:
            tile_words = adapters.words() if pieces is None else pieces.words_of(size, adapters)
        arrays = [
            step.input_ids,
            step.rope_positions,
            tile_words,
            _NO_ROWS if step.sampled_rows is None else step.sampled_rows,
            *unread,
            _NO_ROWS if drawn is None else drawn.view(np.int64),
        ]
        attention: Any = self._attention
        batch = step.batch if change is None else step.batch_without_tables
        inputs, copied = bring_step(attention, batch, arrays, self._device, self._device_tables, change)
        input_ids, positions, tiles, rows, unread_rows, sources, draws = copied
        if unread.size:
            assert self._last_token_ids is not None, "a sequence awaits a token that no step has sampled"
            input_ids[unread_rows] = self._last_token_ids[sources]
        if pictures is not None and self._picture_attention is not None:
            attention = self._picture_attention
            inputs = attention.prepare(inputs, pictures.runs)
        states = None
        if pieces is not None:
            hidden = pieces.run(size, input_ids, positions, inputs, None if adapters is None else tiles)
            if self._taps is not None:
                states = pieces.states_of(len(hidden))
        else:
            taps = None if self._taps is None else Taps(self._taps[0])
            if adapters is not None:
                adapters.put(tiles)
            context = StepContext(
                positions=positions.view(step.rope_positions.shape),
                attention=attention,
                inputs=inputs,
                state_groups=()
                if self._states is None
                else self._states.group(step.sequence_slots, batch, step.num_drafts),
                pictures=pictures,
                adapters=adapters,
                taps=taps,
            )
            hidden = self._network(input_ids, context)
            if taps is not None:
                states = torch.cat(taps.found, dim=-1)
        if self._taps is not None and states is not None:
            counts = step.num_queries
            starts = (step.lens - counts).tolist()
            self._taps[1](step.sequences, starts, counts.tolist(), states)
        chosen = hidden if step.sampled_rows is None else hidden[rows]
        return hidden, chosen, None if drawn is None else draws.view(torch.float64).view(drawn.shape)

    def _unread(self, step: StepInputs) -> IntArray:
        """[2, n]: rows whose token only the device knows, and its place among the tokens of the step before."""
        return np.stack((np.array(step.unread_rows, dtype=np.int64), self._last_rows[step.unread_slots]))

    def _note_rows(self, step: StepInputs) -> None:
        """Where the tokens of this step's sequences lie: a slot's own until its sequence is sampled again."""
        slots = np.array([chunk[0].slot for chunk in step.sampled], dtype=np.int64)
        most = slots.max(initial=0)
        if most >= len(self._last_rows):
            self._last_rows = np.resize(self._last_rows, 2 * int(most) + 1)
        self._last_rows[slots] = np.cumsum([chunk[3] for chunk in step.sampled], dtype=np.int64) - 1

    def _draws(self, step: StepInputs) -> DrawColumns | None:
        """Of all rows that are sampled."""
        return self._sampler.draws(*_sampled_places(step)) if step.sampled else None

    def _sample_captured(
        self, step: StepInputs, output: torch.Tensor, ending: Ending, draws: torch.Tensor | None
    ) -> Sampled | None:
        if ending is Ending.LOGITS:
            return self._sample(step, output, _identity, draws)
        return SampledRows(output) if step.sampled else None

    def _sample(
        self,
        step: StepInputs,
        rows: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
        draws: torch.Tensor | None,
    ) -> Sampled | None:
        if not step.sampled:
            return None
        if step.drafts:
            return self._verify(step, logits(rows), draws)
        return self._sampler.start(logits(rows), *_sampled_places(step), draws)

    def _verify(self, step: StepInputs, logits: torch.Tensor, draws: torch.Tensor | None) -> VerifiedRows:
        """Drafts one by one where a token depends on those before it, or where that saves draws; all others at once."""
        alone: dict[int, list[SampledToken]] = {}
        together: list[tuple[int, Any, int]] = []
        row = 0
        for chunk in step.sampled:
            sequence, num_sampled = chunk.sequence, chunk.num_sampled
            position = chunk.start + chunk.num_tokens + 1 - num_sampled
            drafts = step.drafts.get(sequence.seq_id, [])
            is_quick = sequence.params.is_greedy or logits.device.type != "cpu"
            if drafts and (not is_quick or self._sampler.has_rules(sequence)):
                alone[row] = self._sampler.verify(logits[row : row + num_sampled], sequence, position, drafts)
            else:
                together += [(row + index, sequence, position + index) for index in range(num_sampled)]
            row += num_sampled
        if not alone:
            all_rows = self._sampler.start(logits, *_sampled_places(step), draws)
            return VerifiedRows(all_rows.token_ids, list(range(row)), all_rows, {})
        token_ids = torch.zeros(row, dtype=torch.int64, device=logits.device)
        sampled = None
        if together:
            places, sequences, positions = zip(*together, strict=True)
            sampled = self._sampler.start(logits[list(places)], sequences, positions)
            token_ids[list(places)] = sampled.token_ids
        return VerifiedRows(token_ids, [place for place, _, _ in together], sampled, alone)

    def _prompt_logprobs(self, step: StepInputs, hidden: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for chunk, row in step.scored:
            sequence = chunk.sequence
            stop = min(chunk.start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
            scored: list[TokenLogprobs] = []
            for start in range(chunk.start, stop, _PROMPT_ROWS):
                end = min(start + _PROMPT_ROWS, stop)
                first = row + start - chunk.start
                scored += self._sampler.prompt_logprobs(
                    self._network.logits(hidden[first : first + end - start]),
                    sequence.token_ids[start + 1 : end + 1],
                    sequence.params.prompt_logprobs or 0,
                )
            found[sequence.seq_id] = tuple(scored)
        return found


def _by_chunk(step: StepInputs, tokens: Sequence[SampledToken]) -> tuple[tuple[SampledToken, ...], ...]:
    chunks = step.sampled
    if len(chunks) == len(tokens):
        return tuple([(token,) for token in tokens])
    left = iter(tokens)
    found = []
    for chunk in chunks:
        given = tuple(islice(left, chunk.num_sampled))
        found.append(given[: _num_kept(given, step.drafts.get(chunk.sequence.seq_id, ()))])
    return tuple(found)


def _num_kept(tokens: Sequence[SampledToken], drafts: Sequence[int]) -> int:
    """How many follow from what is right: a token that is not the draft in its place is the last."""
    for index, draft in enumerate(drafts):
        if tokens[index].token_id != draft:
            return index + 1
    return len(tokens)


def _sampled_places(step: StepInputs) -> tuple[list[TokenSequence], list[int]]:
    """Of each row that is sampled, in the order of the plan: its sequence, and its token's position."""
    sequences: list[TokenSequence] = []
    positions: list[int] = []
    for sequence, start, num_tokens, num_sampled in step.sampled:
        end = start + num_tokens + 1
        if num_sampled == 1:
            sequences.append(sequence)
            positions.append(end - 1)
        else:
            sequences += [sequence] * num_sampled
            positions += range(end - num_sampled, end)
    return sequences, positions


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _reader(sampled: Sampled | None) -> Callable[[], list[SampledToken]]:
    """Reads tokens once they are there. On a GPU their copy is queued now, so that reading waits for no later step."""
    if sampled is None:
        return list
    if sampled.token_ids.device.type == "cpu":
        tokens = sampled.read()
        return lambda: tokens
    if isinstance(sampled, VerifiedRows) or sampled.token_ids.device.type != "cuda" or sampled.logprobs is not None:
        return sampled.read
    host = torch.empty(sampled.token_ids.shape, dtype=torch.int64, pin_memory=True)
    host.copy_(sampled.token_ids, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[SampledToken]:
        copied.synchronize()
        return [_new_tuple(SampledToken, (token_id, None)) for token_id in host.tolist()]

    return read


def _make_picture_attention(loaded: LoadedNetwork, attention: Any, blocks: KvBlocks) -> PictureAttention | None:
    """Of models whose pictures are seen whole."""
    if loaded.tower is None or not loaded.tower.family.sees_whole:
        return None
    group = blocks.layout.group
    if group.num_scales and blocks.device.type != "cpu":
        raise UnsupportedError(
            "a KV cache of 8 bits is not supported on a GPU for a model whose pictures are seen whole"
        )
    return PictureAttention(attention, loaded.attention, num_kv_heads=group.num_heads, device=blocks.device)


def load_runner(
    checkpoint: Checkpoint,
    options: EngineOptions,
    make_sampler: Callable[[], Sampler],
    scheme: Scheme | None = None,
    *,
    kv_share: float = 1.0,
) -> Runner:
    """A runner of a checkpoint, which is not read afterwards. `scheme`: see `load_network`. `kv_share`: the most of the
    memory that is free beside weights and steps that its KV cache takes.

    `make_sampler` is called after the weights are read.

    Raises ServerErrors that name the file or the option.
    """
    options = with_lora_rank(sized_for(options, choose_device(options.device)))
    followers = Followers(checkpoint.place, options) if options.tensor_parallel_size > 1 else None
    try:
        runner = _load(checkpoint, options, make_sampler, followers, scheme, kv_share)
    except BaseException:
        if followers is not None:
            followers.close()
        raise
    with ExitStack() as failed:
        failed.callback(runner.close)
        if options.capture_at_load and not options.has_trained_drafts:  # `tap` captures then
            runner.capture_all()
        if followers is not None:
            followers.limit_steps()
        failed.pop_all()
    return runner


def _load(
    checkpoint: Checkpoint,
    options: EngineOptions,
    make_sampler: Callable[[], Sampler],
    followers: Followers | None,
    scheme: Scheme | None,
    kv_share: float,
) -> Runner:
    if followers is None:
        loaded = load_network(checkpoint, options, scheme=scheme)
    else:
        loaded = load_network(checkpoint, rank_options(options, 0), followers.rank)
    give_back(_MUCH_LEFT_BYTES)
    if loaded.device.type == "cpu" and sum(layer.num_bytes for layer in loaded.layers) >= _MANY_BYTES:
        # Tokens are a little slower until it is done, and need not wait for it.
        threading.Thread(target=use_huge_pages, name="huge-pages", daemon=True).start()
    what = f"the LLM in {checkpoint.place}"
    with ExitStack() as held:
        if loaded.states is not None:
            held.callback(reserve_states(loaded.states, options, device=loaded.device, what=what).release)
            if options.enable_prefix_caching:
                logger.info("layers of %s keep a state of each sequence, so no prefixes are cached", what)
        if loaded.adapted is not None:
            held.callback(reserve_adapters(loaded.adapted, options, device=loaded.device, what=what).release)
        head = load_head(checkpoint, options, default="last", device=loaded.device)
        num_threads = choose_num_threads(checkpoint, loaded.device, options)
        sampler = make_sampler()
        step_bytes, others_left = 0, None
        if followers is not None:
            followers.await_loaded()
        is_measured = not (options.kv_cache_memory_bytes or options.num_gpu_blocks_override)
        if loaded.device.type == "cuda" and is_measured:
            counters = CudaMemory(loaded.device)
            step_bytes = _step_bytes(loaded, options, sampler, head, counters, what, followers)
            step_bytes += drafting_bytes(loaded.kv_layout, options, loaded.max_model_len)
            counters.used()  # gives back what the trial took
            others_left = None if followers is None else followers.least_left()
        memory = reserve_kv_memory(
            loaded.kv_layout,
            options,
            max_model_len=loaded.max_model_len,
            window=loaded.attention.window,
            device=loaded.device,
            what=what,
            step_bytes=step_bytes,
            most_share=kv_share,
            others_left=others_left,
        )
        held.callback(memory.reservation.release)
        attention = make_attention(options.attention_backend, memory.blocks, loaded.attention)
        if followers is not None:
            followers.open_pool(Pool(memory.blocks.num_blocks, memory.blocks.block_size))
        return Runner(
            loaded,
            sampler=sampler,
            head=head,
            blocks=memory.blocks,
            attention=attention,
            **_make_graphs(loaded, attention, options, memory.blocks, followers),
            followers=followers,
            num_threads=num_threads,
            # The other ranks get their steps from the host, tokens and all.
            is_asynchronous=can_capture(loaded.device) and followers is None,
            close=held.pop_all().close,
        )


def _step_bytes(
    loaded: LoadedNetwork,
    options: EngineOptions,
    sampler: Sampler,
    head: EmbeddingHead,
    memory: Memory,
    what: str,
    followers: Followers | None,
) -> int:
    """What steps and their graphs will take of a GPU.

    Raises UnavailableError if the largest step does not fit.
    """
    blocks = KvBlocks(
        loaded.kv_layout, num_blocks=2, block_size=choose_block_size(options, loaded.device), device=loaded.device
    )
    attention = make_attention(options.attention_backend, blocks, loaded.attention)
    began = memory.used()
    graphs = _make_graphs(loaded, attention, options, blocks, followers)
    inputs = max(0, memory.used() - began)
    if followers is not None:
        followers.open_pool(Pool(blocks.num_blocks, blocks.block_size))
    trial = Runner(
        loaded,
        sampler=sampler,
        head=head,
        blocks=blocks,
        attention=attention,
        is_asynchronous=followers is None,
        followers=followers,
        **graphs,
    )
    try:
        found = trial.measure_memory(options, memory)
        pictures = 0 if loaded.tower is None else picture_bytes(loaded.tower, options, memory)
    except torch.OutOfMemoryError as error:
        raise UnavailableError(
            f"{what}: a step of max_num_batched_tokens {options.max_num_batched_tokens} and max_num_seqs "
            f"{options.max_num_seqs} does not fit into the GPU beside the weights; lower them: {error}"
        ) from error
    logger.info(
        "%s: a step of %d tokens takes up to %.1f MiB, graphs of steps %.1f MiB, pictures %.1f MiB",
        what,
        options.max_num_batched_tokens,
        found.step / _MIB,
        (found.graphs + inputs) / _MIB,
        pictures / _MIB,
    )
    return found.step + found.graphs + inputs + pictures


class _Graphs(TypedDict):
    tables: DeviceTables | None
    captured: CapturedDecode | None
    pieces: CapturedPieces | None


def _make_graphs(
    loaded: LoadedNetwork,
    attention: PagedAttention,
    options: EngineOptions,
    blocks: KvBlocks,
    followers: Followers | None,
) -> _Graphs:
    """Where steps can be graphs: on a GPU, for a network whose course depends on no value. Those of decode steps have
    attention in them, where that is possible; those of other steps have none."""
    graphs = CudaGraphs()
    tables = device_tables(attention, blocks, options.max_num_seqs, loaded.max_model_len)
    leads, leads_pieces = (None, None) if followers is None else (followers.leading, followers.capture_pieces)
    captured = captured_decode(loaded, attention, options, tables, graphs, leads)
    pieces = captured_pieces(loaded, attention, options, blocks, graphs, leads_pieces)
    return _Graphs(tables=tables, captured=captured, pieces=pieces)
