"""Any causal language model of `transformers` whose attention can be exchanged, on our blocks.

Slower than our own decoder, but there is nothing to write for a new family. transformers is imported when this is used.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from modelserver.backend import UnsupportedError

from ..attention.chunked import make_sdpa
from ..attention.kv_blocks import KvBlocks, KvLayout
from ..attention.paged import AttentionSpec
from ..checkpoint import Checkpoint
from ..plan import Chunk
from ..quantization import stored_method, transformers_options
from ..sampling_params import SamplingParams
from ..sequence import Sequence
from ..step_context import StepContext
from ..step_inputs import StepInputs
from . import attention_hook
from .attention_hook import HeadFit, fit_heads
from .attention_trial import NUM_TRIED, AttentionCall, TrialAttention, check_equal
from .grouped_mixer import GroupedMixer
from .mxfp4_experts import are_kept_packed, check_datatypes, pack_experts, taking_their_place
from .packed_modules import pack_linears
from .pretrained import load_pretrained
from .recurrent_states import RecurrentStates
from .state_cache import StateProbe, StepCache, stateful_cache, unknown_states

logger = logging.getLogger(__name__)

# Steps over a few tokens as they come in service: several sequences in one, each from its own position on, and layers
# that keep states going on from them.
_LENS = (11, 8, 5)
# Of each step, what sequences add: a beginning, a chunk that goes on beside a first token, two chunks, a token
# beside a chunk, and a token of each. Most tokens are elsewhere in their step than in their sequence.
_Steps = tuple[tuple[tuple[int, int, int], ...], ...]
_STEPS: _Steps = (
    ((0, 0, 4),),
    ((0, 4, 3), (1, 0, 1)),
    ((0, 7, 2), (1, 1, 4)),
    ((0, 9, 1), (1, 5, 2)),
    ((0, 10, 1), (1, 7, 1)),
)
# Prompts of unlike lengths that begin together, chunks of one length that go on together, and a token of each.
_STACKED_STEPS: _Steps = (
    ((0, 0, 5), (1, 0, 4), (2, 0, 2)),
    ((0, 5, 3), (1, 4, 3), (2, 2, 2)),
    ((0, 8, 3), (1, 7, 1), (2, 4, 1)),
)
_BLOCK_SIZE = 16


def check_steps(
    network: TransformersNetwork,
    states: RecurrentStates | None,
    spec: AttentionSpec,
    kv_layout: KvLayout,
    steps: _Steps = _STEPS,
) -> None:
    """UnsupportedError, if logits differ from those of the model's own computation of each sequence as a whole."""
    device = network.device
    if states is not None:
        states.allocate(len(_LENS))
    block_size = math.gcd(_BLOCK_SIZE, *(chunk for chunk in spec.chunks if chunk is not None))
    each = -(-max(_LENS) // block_size)
    blocks = KvBlocks(kv_layout, num_blocks=1 + len(_LENS) * each, block_size=block_size, device=device)
    attention = make_sdpa(blocks, spec)
    sequences = [
        Sequence(slot, list(range(length)), length, SamplingParams(), slot=slot, block_ids=array("q", block_ids))
        for slot, length in enumerate(_LENS)
        for block_ids in [list(range(1 + slot * each, 1 + slot * each + each))]
    ]
    sequences = sequences[: 1 + max(slot for chunks in steps for slot, _, _ in chunks)]
    found: dict[int, list[torch.Tensor]] = {sequence.seq_id: [] for sequence in sequences}
    for chunks in steps:
        planned = [Chunk(sequences[slot], start, count, num_sampled=1) for slot, start, count in chunks]
        step = StepInputs(planned, block_size)
        ids, positions = (torch.from_numpy(rows).to(device) for rows in (step.input_ids, step.positions))
        context = StepContext(
            positions=positions,
            attention=attention,
            inputs=attention.prepare(step.batch),
            state_groups=() if states is None else states.group(step.sequence_slots, step.batch),
        )
        logits = network.logits(network(ids, context))
        parts = logits.split(step.batch.num_queries.tolist())
        for sequence, part in zip(step.sequences, parts, strict=True):
            found[sequence.seq_id].append(part)
    expected = [network.own_logits(torch.tensor(sequence.token_ids, device=device)) for sequence in sequences]
    check_equal(
        torch.cat([torch.cat(found[sequence.seq_id]) for sequence in sequences]),
        torch.cat(expected),
        is_exact=network.is_exact,
        is_strict=steps is _STACKED_STEPS,
    )


# The models' names for their cache.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Errors of code that is called in a way that it was not written for.
_UNEXPECTED = (AttributeError, TypeError, LookupError, ValueError, RuntimeError, AssertionError)


class TransformersNetwork:
    """Calls `model`, a `...ForCausalLM`, whose attention functions find this object through their modules.

    `is_exact`: it computes in float32 throughout, so that the same tokens have nearly the same logits each time.
    """

    def __init__(self, model: Any, *, is_exact: bool) -> None:
        self.device: torch.device = model.device
        self._model = model
        self._inner = _inner_of(model)
        self._inner_forward = self._inner.forward
        self._inner.forward = self._forward_inner
        self._attention: Any = None
        self._inputs: Any = None
        self._hidden: torch.Tensor | None = None
        self.is_exact = is_exact
        self._output_type: Any = None
        # Of each layer that attends, what makes its heads as all are; and which of them a layer is.
        self._fits: list[HeadFit | None] = []
        self._places: dict[int, int] = {}
        # Of a network whose layers do not all attend.
        self.states: RecurrentStates | None = None
        self._cache = StepCache()
        parameters = signature(self._inner_forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), "")
        # Llama 4's layers count their tokens on from what their cache has, for the temperature of queries.
        self._counts_tokens = bool(getattr(model.config.get_text_config(), "attn_temperature_tuning", False))
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.paged_network = self

    def __call__(self, input_ids: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        """`input_ids` [tokens] -> [tokens, hidden_size], normalised."""
        self._attention, self._inputs = step.attention, step.inputs
        if self.states is not None:
            self.states.groups = step.state_groups
        hidden = self._compute(input_ids, step.positions)
        if step.taps is not None:
            step.taps.found.append(hidden)
        return hidden

    @property
    def modules(self) -> tuple[Any, Any]:
        """The model of transformers, and what of it gives the states that its head takes."""
        return self._model, self._inner

    def _compute(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"use_cache": self.states is not None}
        if self._counts_tokens:
            self._cache.num_before = positions - torch.arange(len(positions), device=positions.device)
        if self._counts_tokens or self.states is not None:
            given[self._cache_name] = self._cache
        output = self._inner(input_ids=input_ids[None], position_ids=positions[None], **given)
        self._output_type = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_size]; whatever the model does to them after its head, it does."""
        self._hidden = hidden[None]
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            return self._model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._hidden = None

    def attend(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        if self.states is not None:
            layer = self._cache.layer
        if isinstance(self._attention, TrialAttention):
            return self._attention(layer, queries, kv, call)
        place = self._places[layer]
        fit = self._fits[place]
        if fit is None:
            return self._attention(place, queries, kv, self._inputs)
        return fit.narrowed(self._attention(place, fit.queries(queries), fit.kv(kv), self._inputs))

    def try_out(self) -> list[AttentionCall]:
        """How each layer attends. UnsupportedError, if that says anything else than the model's own attention."""
        model, trial = self._model, TrialAttention()
        ids = torch.arange(NUM_TRIED, device=model.device)
        self._find_states(ids)
        if self.states is not None:
            self.states.allocate(0)
            self.states.groups = self.states.group_alone(NUM_TRIED)
        self._attention, self._inputs = trial, None
        model.set_attn_implementation(attention_hook.TRIAL)
        found = self.logits(self._compute(ids, ids))
        check_equal(found, self.own_logits(ids), is_exact=self.is_exact)
        self._places = {layer: place for place, layer in enumerate(sorted(trial.calls))}
        return [trial.calls[layer] for layer in self._places]

    def own_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocab_size] of a whole sequence, by the model's own attention and without a cache."""
        model, positions = self._model, torch.arange(len(token_ids), device=self.device)
        model.set_attn_implementation("eager")
        try:
            own = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
            return own.logits[0].float()
        finally:
            model.set_attn_implementation(attention_hook.SERVING)

    def _find_states(self, ids: torch.Tensor) -> None:
        model, cache = self._model, stateful_cache(self._model)
        if cache is None:
            return
        if not self._cache_name:
            raise unknown_states(model)
        model.set_attn_implementation("eager")
        with StateProbe(model, cache) as probe:
            self._inner(input_ids=ids[None], position_ids=ids[None], use_cache=True, **{self._cache_name: cache})
        self.states = RecurrentStates(probe.shapes(), self.device)
        for mixer in probe.mixers:
            mixer.forward = GroupedMixer(mixer.forward, self.states)

    def attention_of(self, calls: list[AttentionCall]) -> tuple[AttentionSpec, AttentionCall]:
        """What all layers together want of attention, and the call that is right for each: from now on that is made."""
        common, self._fits = fit_heads(calls)
        chunks = tuple(call.chunk for call in calls)
        spec = AttentionSpec(
            num_heads=common.num_heads,
            windows=tuple(call.window for call in calls),
            scale=common.scale,
            softcap=common.softcap,
            sinks=tuple(_fitted_sinks(call, fit) for call, fit in zip(calls, self._fits, strict=True)),
            chunks=chunks if any(chunks) else (),
        )
        return spec, common

    def _forward_inner(self, *args: Any, **kwargs: Any) -> Any:
        """The model without its head; while logits are made, its result is there already."""
        if self._hidden is None:
            return self._inner_forward(*args, **kwargs)
        return self._output_type(last_hidden_state=self._hidden)


def _inner_of(model: Any) -> Any:
    """What a `...ForCausalLM` calls before its head: not always its base_model, but a decoder within that, or one under
    another name than transformers looks for (Llama 4).
    """
    from transformers import PreTrainedModel

    for inner in (model.get_decoder(), model.base_model, *model.children()):
        if isinstance(inner, PreTrainedModel) and inner is not model:
            return inner
    raise UnsupportedError(f"{type(model).__name__} has no part that gives what its head takes")


@dataclass(frozen=True, slots=True)
class TransformersLoaded:
    """What `load` found; layers are alike but for windows, chunks and sinks. Where none attends, blocks only count."""

    network: TransformersNetwork
    attention: AttentionSpec
    kv_layout: KvLayout
    vocab_size: int


def load_transformers(
    checkpoint: Checkpoint, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device
) -> TransformersLoaded:
    """UnsupportedError, if transformers is not installed or does not know the model, or it does not run on blocks;
    InvalidArgumentError, if files are damaged or weights are missing. Code that comes with a checkpoint is not run.
    """
    model_type = config["model_type"]
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UnsupportedError(
            f"config.json says {model_type}, which this server has no network for; with transformers installed "
            "(pip install transformers) it runs most others"
        ) from None
    attention_hook.register()
    try:
        model = load_pretrained(
            AutoModelForCausalLM,
            checkpoint,
            model_type,
            dtype=dtype,
            attn_implementation=attention_hook.SERVING,
            **_weight_options(checkpoint, config, device),
        )
    except KeyError as error:
        raise UnsupportedError(
            f"the attention of a {model_type} cannot be exchanged, so that it does not run on blocks: KeyError: {error}"
        ) from None
    described = model.config.get_text_config()
    with _refusing(model_type), torch.inference_mode():
        model = model.eval().to(device)
        # Packed experts multiply rows in 8 bits.
        is_exact = not pack_experts(model) and dtype == torch.float32
        network = TransformersNetwork(model, is_exact=is_exact)
        pack_linears(model, lambda: network.own_logits(torch.arange(NUM_TRIED, device=device)))
        calls = network.try_out()
        # Layers that keep states need not attend; whether anything is left out, the trial has shown.
        _check_alike(model_type, calls, len(calls) if network.states is not None else int(described.num_hidden_layers))
        attention, common = network.attention_of(calls)
        kv_layout = KvLayout.uniform(
            num_layers=len(calls), num_kv_heads=common.num_kv_heads, head_dim=common.head_dim, dtype=dtype
        )
        _try_steps(network, attention, kv_layout)
    return TransformersLoaded(network, attention, kv_layout, int(described.vocab_size))


def _weight_options(checkpoint: Checkpoint, config: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """How weights that are not floats are loaded. Packed experts are read by parameters of their own, so that
    transformers need not know of any quantization.
    """
    if stored_method(config) != "mxfp4" or not are_kept_packed(checkpoint, device):
        return transformers_options(config)
    check_datatypes(checkpoint)
    from transformers import AutoConfig

    plain = AutoConfig.from_pretrained(checkpoint.transformers_directory, local_files_only=True)
    del plain.quantization_config
    return {"config": plain, "within": taking_their_place()}


def _try_steps(network: TransformersNetwork, attention: AttentionSpec, kv_layout: KvLayout) -> None:
    """Some layers of transformers forget their state where several tokens come: they get one at a time. And some know
    no padding, or compute a batch in other ways than a sequence alone: they get prompts one by one.
    """
    states = network.states
    try:
        check_steps(network, states, attention, kv_layout)
    except UnsupportedError:
        if states is None:
            raise
        states.is_stepwise = True
        check_steps(network, states, attention, kv_layout)
    if states is not None:
        states.stacks_prompts = True
        try:
            check_steps(network, states, attention, kv_layout, _STACKED_STEPS)
        except (UnsupportedError, *_UNEXPECTED) as error:
            logger.info("layers that keep states compute prompts one by one: %s", error)
            states.stacks_prompts = False


@contextmanager
def _refusing(model_type: str) -> Iterator[None]:
    """Whatever transformers' code for one of its hundreds of models does not expect of our attention shows here."""
    try:
        yield
    except _UNEXPECTED as error:
        raise UnsupportedError(
            f"the {model_type} of transformers does not run on blocks: {type(error).__name__}: {error}"
        ) from error


def _check_alike(model_type: str, calls: list[AttentionCall], num_layers: int) -> None:
    if len(calls) != num_layers:
        raise UnsupportedError(
            f"{len(calls)} of the {num_layers} layers of this {model_type} have attention that can be exchanged"
        )
    softcaps = {call.softcap for call in calls}
    if len(softcaps) > 1:
        raise UnsupportedError(
            f"the layers of this {model_type} attend differently: softcap {sorted(softcaps, key=str)}"
        )


def _fitted_sinks(call: AttentionCall, fit: HeadFit | None) -> torch.Tensor | None:
    if call.sinks is None:
        return None
    sinks = call.sinks.detach().float().contiguous()
    return sinks if fit is None else fit.sinks(sinks)
