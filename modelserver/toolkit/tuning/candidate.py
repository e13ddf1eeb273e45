"""A setting of the knobs that are tuned, read from a model config and written into one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelserver.config.schema import ModelConfig, ModelDynamicBatching
from modelserver.core.numerals import is_digits

# The parameter that says how many threads one execution uses.
THREAD_PARAMETERS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """`delay_us` None: no dynamic batching. `num_threads` 0: the backend's default; None: it has no such parameter."""

    num_instances: int = 1
    max_batch_size: int = 0
    delay_us: int | None = None
    num_threads: int | None = None

    def __str__(self) -> str:
        words = [f"{self.num_instances} instance{'s' if self.num_instances > 1 else ''}"]
        if self.num_threads is not None:
            words.append(f"{self.num_threads or 'default'} thread{'' if self.num_threads == 1 else 's'}")
        if self.delay_us is None:
            words.append("no batching")
        else:
            words.append(f"batches up to {self.max_batch_size}, delay {self.delay_us} us")
        return ", ".join(words)


def read_candidate(config: ModelConfig) -> Candidate:
    """The settings in a completed config."""
    batching = config.dynamic_batching
    parameter = THREAD_PARAMETERS.get(config.backend)
    threads = config.parameters.get(parameter, "0") if parameter else None
    return Candidate(
        num_instances=config.instance_group[0].count if config.instance_group else 1,
        max_batch_size=config.max_batch_size,
        delay_us=batching.max_queue_delay_microseconds if batching is not None else None,
        num_threads=int(threads) if threads is not None and is_digits(threads) else None,
    )


def apply_candidate(candidate: Candidate, config: ModelConfig) -> ModelConfig:
    """`config` with the candidate's setting, and otherwise as it was.

    Preferred batch sizes and the largest batch belong together: they stay only where that does not change.
    """
    groups = config.instance_group
    if groups:
        groups = (replace(groups[0], count=candidate.num_instances), *groups[1:])
    parameters = dict(config.parameters)
    name = THREAD_PARAMETERS.get(config.backend)
    if name is not None and candidate.num_threads is not None:
        parameters.pop(name, None)
        if candidate.num_threads:
            parameters[name] = str(candidate.num_threads)
    return replace(
        config,
        max_batch_size=candidate.max_batch_size,
        dynamic_batching=_batching(candidate, config),
        instance_group=groups,
        parameters=parameters,
    )


def _batching(candidate: Candidate, config: ModelConfig) -> ModelDynamicBatching | None:
    if candidate.delay_us is None:
        return None
    old = config.dynamic_batching or ModelDynamicBatching()
    keeps = candidate.max_batch_size == config.max_batch_size
    return replace(
        old,
        max_queue_delay_microseconds=candidate.delay_us,
        preferred_batch_size=old.preferred_batch_size if keeps else (),
    )


def changes(before: Candidate, after: Candidate) -> Sequence[tuple[str, str, str]]:
    """The differences: rows of (knob, before, after)."""
    rows = []
    for name, one, other in (
        ("instances", before.num_instances, after.num_instances),
        ("largest batch", before.max_batch_size, after.max_batch_size),
        ("queue delay (us)", before.delay_us, after.delay_us),
        ("threads", before.num_threads, after.num_threads),
    ):
        if one != other:
            rows.append((name, _word(one), _word(other)))
    return rows


def _word(value: int | None) -> str:
    return "no batching" if value is None else str(value)
