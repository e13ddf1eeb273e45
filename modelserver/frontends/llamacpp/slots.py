"""What runs, in the words of llama.cpp's server: its slots, and its page of metrics.

A slot is one of the sequences that an engine computes at once. Models of other backends tell how many requests they
have, and one slot for each of their instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson

from modelserver.errors import ErrorCode, ServerError
from modelserver.frontends.llamacpp.request import INTEGERS, NUMBERS
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.prompts import column_of
from modelserver.frontends.llm.requests import only_responses
from modelserver.planes.authorized import AnyDataPlane
from modelserver.telemetry.measurement import Measurement

Document = dict[str, Any]

# What models answer to an operation that they do not have.
_UNKNOWN = (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)


async def slots_of(dataplane: AnyDataPlane, model: LanguageModel) -> list[Document]:
    """All slots of a model, in their order. Of several instances of one model, the slots of the one that answers.

    Raises ServerError.
    """
    engine = await _engine(dataplane, model)
    if engine is None:
        load = dataplane.load_of(model.name)
        slots = [idle_slot(number, model.max_model_len or 0) for number in range(load.num_instances)]
        for slot in slots[: load.num_inflight]:
            slot["is_processing"] = True
        return slots
    length, is_speculative = engine["max_model_len"], engine["is_speculative"]
    slots = [idle_slot(number, length, is_speculative=is_speculative) for number in range(engine["num_slots"])]
    for sequence in engine["running"]:
        slots[sequence["slot"]] |= _running(sequence)
    return slots


def idle_slot(number: int, length: int, *, is_speculative: bool = False) -> Document:
    """A slot that nothing runs in, of a model whose prompts and outputs have at most `length` tokens."""
    return {
        "id": number,
        "id_task": -1,
        "n_ctx": length,
        "speculative": is_speculative,
        "is_processing": False,
        "params": {},
        "next_token": {"has_next_token": False, "n_remain": -1, "n_decoded": 0},
    }


def _running(sequence: Mapping[str, Any]) -> Document:
    """What differs of a slot with a sequence."""
    sampling, num_decoded = sequence["sampling"], sequence["num_output_tokens"]
    most = num_decoded + sequence["num_remaining_tokens"]
    told = {name: sampling[ours] for name, ours in (NUMBERS | INTEGERS).items() if ours in sampling}
    return {
        "id_task": sequence["sequence"],
        "is_processing": True,
        "n_prompt_tokens": sequence["num_prompt_tokens"],
        "n_prompt_tokens_processed": min(sequence["num_computed_tokens"], sequence["num_prompt_tokens"]),
        "n_prompt_tokens_cache": sequence["num_cached_tokens"],
        "params": {
            **told,
            "n_predict": most,
            "max_tokens": most,
            "ignore_eos": sampling["ignore_eos"],
            "n_probs": sampling.get("logprobs", 0),
            "stream": sequence["is_streamed"],
        },
        "next_token": {
            "has_next_token": True,
            "n_remain": sequence["num_remaining_tokens"],
            "n_decoded": num_decoded,
        },
    }


async def _engine(dataplane: AnyDataPlane, model: LanguageModel) -> Document | None:
    """What the model's engine tells of its slots; None for a model that knows of none."""
    if "operation" not in model.inputs:
        return None
    try:
        (response,) = await only_responses(dataplane, [model.request({"operation": "slots"}, {})])
    except ServerError as error:
        if error.code in _UNKNOWN:
            return None
        raise
    texts = column_of(response, "text_output")
    return orjson.loads(texts[0]) if texts else None


def metrics_page(dataplane: AnyDataPlane, model: LanguageModel) -> str:
    """The page of one model, for Prometheus. What a model does not measure is left out.

    Raises as the data plane does for a model that is not ready.
    """
    engines: list[Sequence[Measurement]] = []
    num_running = num_waiting = 0
    for version, numbers in dataplane.statistics(model.name):
        engines += version.measure() if version.measures else ()
        num_running += numbers.inflight - numbers.pending
        num_waiting += numbers.pending
    measured = _Measured(chain.from_iterable(engines))
    rows: list[tuple[str, str, str, float]] = []
    if "num_requests_running" in measured.counts:
        num_running, num_waiting = int(measured["num_requests_running"]), int(measured["num_requests_waiting"])
        read, read_s = (
            measured["prompt_tokens"] - measured["prompt_tokens_cached"],
            measured["request_prefill_time_seconds"],
        )
        said, said_s = measured["generation_tokens"], measured["request_decode_time_seconds"]
        steps = measured.counts["iteration_tokens_total"]
        rows = [
            ("prompt_tokens_total", "counter", "Prompt tokens that were computed", read),
            ("prompt_seconds_total", "counter", "Time of that, in seconds, of requests that ended", read_s),
            ("prompt_tokens_seconds", "gauge", "Prompt tokens a second, on average", _rate(read, read_s)),
            ("tokens_predicted_total", "counter", "Tokens generated", said),
            ("tokens_predicted_seconds_total", "counter", "Time of that, in seconds, of requests that ended", said_s),
            ("predicted_tokens_seconds", "gauge", "Tokens generated a second, on average", _rate(said, said_s)),
            ("n_decode_total", "counter", "Steps of the engine", steps),
            (
                "n_busy_slots_per_decode",
                "gauge",
                "Sequences of a step, on average",
                _rate(measured["llm_step_sequences"], steps),
            ),
            (
                "n_tokens_max",
                "counter",
                "Prompt and output of the longest sequence",
                measured["llm_longest_sequence_tokens"],
            ),
            (
                "spec_decode_num_draft_tokens_total",
                "counter",
                "Tokens drafted",
                measured["spec_decode_num_draft_tokens"],
            ),
            (
                "spec_decode_num_accepted_tokens_total",
                "counter",
                "Of these, those that were right",
                measured["spec_decode_num_accepted_tokens"],
            ),
            (
                "spec_decode_num_drafts_total",
                "counter",
                "Steps that checked drafts",
                measured["spec_decode_num_drafts"],
            ),
        ]
    rows += [
        ("requests_processing", "gauge", "Requests that run", num_running),
        ("requests_deferred", "gauge", "Requests that wait", num_waiting),
    ]
    return "".join(
        f"# HELP llamacpp:{name} {text}.\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.6g}\n"
        for name, kind, text, value in rows
    )


class _Measured:
    """The measurements of a model's engines by name, added up; those of histograms are sums, with `counts` beside."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._values: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        for each in measurements:
            name = each.name.removeprefix("vllm:")
            self._values[name] = self._values.get(name, 0.0) + each.value
            self.counts[name] = self.counts.get(name, 0) + sum(each.counts)

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0.0)


def _rate(amount: float, duration: float) -> float:
    return amount / duration if duration else 0.0
