"""Settings of the knobs that are tuned, and the values of each that are tried. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from modelserver.config.schema import InstanceGroupKind, ModelConfig, ModelDynamicBatching
from modelserver.core.numerals import is_digits
from modelserver.errors import InvalidArgumentError

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
        dynamic_batching=_candidate_batching(candidate, config),
        instance_group=groups,
        parameters=parameters,
    )


def _candidate_batching(candidate: Candidate, config: ModelConfig) -> ModelDynamicBatching | None:
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


DEFAULT_DELAYS_US = (0, 100, 500, 2000)


@dataclass(frozen=True, slots=True)
class SpaceOptions:
    """The user's values to try; empty: chosen by the model and the machine."""

    instances: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    delays_us: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Space:
    """Values of each knob in ascending order, the model's own among them. `batching` are pairs of a largest batch and a
    delay; (n, None) is without dynamic batching. `notes` say what is not tuned, and why.
    """

    start: Candidate
    instances: tuple[int, ...]
    threads: tuple[int | None, ...]
    batching: tuple[tuple[int, int | None], ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Candidate]:
        """Every combination."""
        for count, threads, (size, delay) in itertools.product(self.instances, self.threads, self.batching):
            yield Candidate(count, size, delay, threads)

    @property
    def size(self) -> int:
        return len(self.instances) * len(self.threads) * len(self.batching)

    def along(self, knob: str, at: Candidate) -> Sequence[Candidate]:
        """`at` with every value of one knob: "instances", "threads", "batch" or "delay"."""
        if knob == "instances":
            return [replace(at, num_instances=count) for count in self.instances]
        if knob == "threads":
            return [replace(at, num_threads=count) for count in self.threads]
        pairs = [(at.max_batch_size, delay) for size, delay in self.batching if size == at.max_batch_size]
        if knob == "batch":
            pairs = [pair for pair in self.batching if _is_like(pair[1], at.delay_us)]
        return [replace(at, max_batch_size=size, delay_us=delay) for size, delay in pairs]


def _is_like(delay: int | None, current: int | None) -> bool:
    """Whether a batch size is tried with this delay: the current one, no batching at all, or, from there, no delay."""
    return delay is None or delay == current or (current is None and delay == 0)


KNOBS = ("threads", "instances", "batch", "delay")


def make_space(config: ModelConfig, options: SpaceOptions, num_cpus: int) -> Space:
    """The values to try for a model. Raises InvalidArgumentError for values that it cannot have."""
    start = read_candidate(config)
    notes: list[str] = []
    return Space(
        start=start,
        instances=_instances(config, options, start, num_cpus, notes),
        threads=_threads(options, start, config, num_cpus, notes),
        batching=_batching(config, options, start, notes),
        notes=tuple(notes),
    )


def _instances(
    config: ModelConfig, options: SpaceOptions, start: Candidate, num_cpus: int, notes: list[str]
) -> tuple[int, ...]:
    if len(config.instance_group) > 1:
        if options.instances:
            raise InvalidArgumentError("--instances: the model has several instance groups, which are not tuned")
        notes.append("instances are not tuned: the model has several instance groups")
        return (start.num_instances,)
    if options.instances:
        return _with(options.instances, start.num_instances)
    most = 4 if any(group.kind is InstanceGroupKind.KIND_GPU for group in config.instance_group) else num_cpus
    return _with([count for count in (1, 2, 4, 8) if count <= most], start.num_instances)


def _threads(
    options: SpaceOptions, start: Candidate, config: ModelConfig, num_cpus: int, notes: list[str]
) -> tuple[int | None, ...]:
    if start.num_threads is None:
        if options.threads:
            raise InvalidArgumentError(f"--threads: backend '{config.backend}' has no parameter for threads")
        return (None,)
    if config.backend == "pytorch" and not options.threads:
        notes.append(
            "threads are not tuned: PyTorch's are those of the whole server (say --threads to try all the same)"
        )
        return (start.num_threads,)
    wanted = options.threads or tuple(count for count in (1, 2, 4, 8, 16) if count <= num_cpus)
    return _with(wanted, start.num_threads)


def _batching(
    config: ModelConfig, options: SpaceOptions, start: Candidate, notes: list[str]
) -> tuple[tuple[int, int | None], ...]:
    most = config.max_batch_size
    own = (start.max_batch_size, start.delay_us)
    reason = ""
    if not most:
        reason = "the model takes no batches (max_batch_size 0)"
    elif config.sequence_batching is not None:
        reason = "sequences decide about batches"
    if reason:
        if options.batch_sizes or options.delays_us:
            raise InvalidArgumentError(f"--batch-sizes and --delays-us: {reason}")
        notes.append(f"batching is not tuned: {reason}")
        return (own,)
    for size in options.batch_sizes:
        if size > most:
            raise InvalidArgumentError(f"--batch-sizes: {size} is above the model's max_batch_size {most}")
    sizes = options.batch_sizes or tuple(sorted({size for size in (8, 32) if size < most} | {most}))
    delays = options.delays_us or DEFAULT_DELAYS_US
    # A batch of one needs no batching; the config's own largest batch stays, so that no client is refused.
    pairs: set[tuple[int, int | None]] = {(size, delay) for size in sizes if size > 1 for delay in delays}
    pairs |= {own, (most, None)}
    return tuple(sorted(pairs, key=lambda pair: (pair[0], -1 if pair[1] is None else pair[1])))


def _with(values: Sequence[int], own: int) -> tuple[int, ...]:
    return tuple(sorted({*values, own}))


# A gain below this may be chance, and no reason to leave a setting.
MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """How good a candidate is; larger is better. One that meets the target beats all that do not; then inferences per
    second count, or, where no target is met, how far the latency is above it.
    """

    is_within: bool
    value: float

    def beats(self, other: Score | None) -> bool:
        """Whether it is better by more than chance."""
        if other is None or self.is_within != other.is_within:
            return other is None or self.is_within
        return self.value > other.value + abs(other.value) * MIN_GAIN


# The result of measuring a candidate; None if it could not be measured.
Scores = dict[Candidate, Score | None]
Search = Callable[[Space, Scores], Iterator[Candidate]]


def climb(space: Space, scores: Scores) -> Generator[Candidate, None, None]:
    """One knob after the other, from the model's own setting to the best value of each, until a round changes nothing.

    Before it is resumed, the score of the candidate that it gave is in `scores`.
    """
    best = space.start
    yield best
    while True:
        before = best
        for knob in KNOBS:
            at = best
            for candidate in space.along(knob, at):
                if candidate not in scores:
                    yield candidate
                score = scores.get(candidate)
                if score is not None and score.beats(scores.get(best)):
                    best = candidate
        if best == before:
            return


def everything(space: Space, scores: Scores) -> Generator[Candidate, None, None]:
    """The model's own setting, then every other."""
    del scores
    yield space.start
    yield from (candidate for candidate in space if candidate != space.start)


def winner(start: Candidate, scores: Scores) -> Candidate:
    """The best one; the model's own setting unless another is better by more than chance."""
    best = start
    for candidate, score in scores.items():
        if score is not None and score.beats(scores.get(best)):
            best = candidate
    return best
