"""A run of tuning: candidate after candidate on the server, until the search has seen enough. Then the best of them."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from modelserver.bench.input_data import DataOptions
from modelserver.bench.options import BenchOptions, LoadOptions, MeasurementOptions, RequestOptions
from modelserver.bench.results import LevelResult
from modelserver.bench.session import run_bench
from modelserver.bench.window import Stability, Window
from modelserver.client.control import LOAD_TIMEOUT_S
from modelserver.client.endpoint import endpoint_at
from modelserver.config.schema import ModelConfig
from modelserver.errors import InvalidArgumentError, ServerError
from modelserver.repository.layout import scan_model
from modelserver.toolkit.comparison import Parity
from modelserver.toolkit.model_directory import model_bytes
from modelserver.toolkit.sample_files import SampleOptions
from modelserver.toolkit.samples import Samples
from modelserver.toolkit.tuning.served_answers import (
    TunedModel,
    borrowed,
    check_labels,
    compare_settings,
    reason_not_to_ask,
)
from modelserver.toolkit.tuning.space import (
    Candidate,
    Scores,
    Space,
    SpaceOptions,
    apply_candidate,
    climb,
    everything,
    make_space,
    winner,
)
from modelserver.toolkit.tuning.trial import Trial, joined, judge, point_of

# Requests before the first window of a candidate, to warm it up.
NUM_WARMUP = 20
# Settings that are measured again when they are the best.
MAX_CONFIRMATIONS = 3
DEFAULT_CONCURRENCIES = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """`url` is that of the server's HTTP port, or with `is_grpc` of its gRPC port. `limit_us` is the latency to stay
    below (0: none), of `percentile` (None: the mean). Windows last `window_s`. `samples` are what the answers before
    and after are compared with; `directory` is the model's, if it is on this machine: its size is reported.
    """

    model: str
    url: str
    is_grpc: bool = False
    space: SpaceOptions = field(default_factory=SpaceOptions)
    limit_us: float = 0.0
    percentile: float | None = 99
    concurrencies: tuple[int, ...] = DEFAULT_CONCURRENCIES
    data: DataOptions = field(default_factory=DataOptions)
    is_exhaustive: bool = False
    max_trials: int = 0
    time_limit_s: float = 0.0
    window_s: float = 0.5
    samples: SampleOptions = field(default_factory=SampleOptions)
    directory: Path | None = None


@dataclass(slots=True)
class TuneResult:
    """The trials, in order. `config` is the original config, `end` says why it ended before the search did.

    `num_bytes` is the size of the version's files where they are known. `parity` is how the best setting's answers
    agree with those of before, or else `not_compared` says why this is unknown.
    """

    options: TuneOptions
    config: ModelConfig
    space: Space
    trials: list[Trial] = field(default_factory=list)
    end: str = ""
    seconds: float = 0.0
    num_bytes: int | None = None
    parity: Parity | None = None
    not_compared: str = ""

    @property
    def baseline(self) -> Trial | None:
        return self._trial(self.space.start)

    @property
    def winner(self) -> Trial | None:
        """The best one; nothing when not even the model's own setting could be measured."""
        scores: Scores = {trial.candidate: trial.score for trial in self.trials}
        found = self._trial(winner(self.space.start, scores))
        return found if found is not None and found.score is not None else None

    @property
    def winning_config(self) -> ModelConfig | None:
        best = self.winner
        return apply_candidate(best.candidate, self.config) if best is not None else None

    def _trial(self, candidate: Candidate) -> Trial | None:
        return next((trial for trial in self.trials if trial.candidate == candidate), None)


class TuneWatcher:
    """Receives the progress of a run."""

    def run_began(self, result: TuneResult) -> None:
        """The candidates are known."""

    def trial_began(self, number: int, candidate: Candidate) -> None:
        """A candidate is loaded and measured."""

    def level_began(self, concurrency: int) -> None:
        """It is measured with this many requests at a time."""

    def trial_ended(self, number: int, trial: Trial) -> None:
        """It is measured, or has failed."""

    def comparison_began(self) -> None:
        """The best candidate is measured beside the model as it was."""


def tune(options: TuneOptions, watcher: TuneWatcher) -> TuneResult:
    """Measure candidates until the search ends, the limits are reached, or Ctrl-C; the model is given back in any case.

    Raises ServerError when the model cannot be changed at all, or cannot be given back.
    """
    endpoint = endpoint_at(options.url, is_grpc=options.is_grpc)
    began_s = time.monotonic()
    with borrowed(endpoint.control(timeout_s=LOAD_TIMEOUT_S), options.model) as model:
        space = make_space(model.config, options.space, _num_cpus())
        result = TuneResult(options, model.config, space, num_bytes=_num_bytes(options))
        samples = _samples(result)
        watcher.run_began(result)
        try:
            _search(model, result, watcher, began_s)
            _confirm(model, result, watcher)
            watcher.comparison_began()
            _compare(model, result, samples)
        except KeyboardInterrupt:
            result.end = "interrupted"
        result.seconds = time.monotonic() - began_s
    return result


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _num_bytes(options: TuneOptions) -> int | None:
    """The size of the newest version's files; None where they are not here."""
    if options.directory is None or not options.directory.is_dir():
        return None
    versions = scan_model(options.directory, options.model).versions
    return model_bytes(versions[max(versions)]) if versions else None


def _samples(result: TuneResult) -> Samples | None:
    """The samples for comparing answers; if none can be made up, None, with the reason in the result.

    Raises InvalidArgumentError for wrong samples of the user: at once, since measuring takes minutes.
    """
    options, config = result.options.samples, result.config
    result.not_compared = reason_not_to_ask(config)
    if options.path is not None:
        if result.not_compared:
            raise InvalidArgumentError(f"--data: answers cannot be compared: {result.not_compared}")
        samples = options.samples(config)
        check_labels(config, samples, options.label_output)
        return samples
    if result.not_compared:
        return None
    try:
        return options.samples(config)
    except InvalidArgumentError as error:
        result.not_compared = error.message
        return None


def _compare(model: TunedModel, result: TuneResult, samples: Samples | None) -> None:
    """Ask the model as it was and with its best setting, both under the load at which each is best."""
    base, best, config = result.baseline, result.winner, result.winning_config
    if samples is None or base is None or base.best is None or best is None or best.best is None or config is None:
        return
    try:
        result.parity = compare_settings(
            model,
            endpoint_at(result.options.url, is_grpc=result.options.is_grpc),
            samples,
            (apply_candidate(base.candidate, result.config), config),
            rows=result.options.data.batch_size,
            num_inflight=(base.best.concurrency, best.best.concurrency),
            output=result.options.samples.label_output,
        )
    except ServerError as error:
        # The measurements are too valuable to be lost because of it.
        result.not_compared = error.message


def _search(model: TunedModel, result: TuneResult, watcher: TuneWatcher, began_s: float) -> None:
    options = result.options
    scores: Scores = {}
    candidates = (everything if options.is_exhaustive else climb)(result.space, scores)
    for number, candidate in enumerate(candidates, 1):
        if options.max_trials and number > options.max_trials:
            result.end = f"ended after {options.max_trials} trials (--max-trials)"
            return
        if options.time_limit_s and time.monotonic() - began_s > options.time_limit_s:
            result.end = f"ended after {options.time_limit_s:g} s (--time-limit)"
            return
        watcher.trial_began(number, candidate)
        trial = _try(model, candidate, options, watcher, is_own=candidate == result.space.start)
        scores[candidate] = trial.score
        result.trials.append(trial)
        watcher.trial_ended(number, trial)


def _confirm(model: TunedModel, result: TuneResult, watcher: TuneWatcher) -> None:
    """Measure the best setting again, and the model's own: one of many may be the best by chance."""
    confirmed = {result.space.start}
    for _ in range(MAX_CONFIRMATIONS):
        best = result.winner
        if best is None or best.candidate in confirmed:
            return
        # The model's own setting last: then both have been measured early and late.
        again = [best.candidate] if len(confirmed) > 1 else [best.candidate, result.space.start]
        confirmed.add(best.candidate)
        for candidate in again:
            number = next(place for place, trial in enumerate(result.trials) if trial.candidate == candidate)
            watcher.trial_began(number + 1, candidate)
            second = _try(model, candidate, result.options, watcher, is_own=False)
            result.trials[number] = joined(result.trials[number], second, result.options.limit_us)
            watcher.trial_ended(number + 1, result.trials[number])


def _try(model: TunedModel, candidate: Candidate, options: TuneOptions, watcher: TuneWatcher, *, is_own: bool) -> Trial:
    """Measure one candidate. If it cannot be served, the result says so; raises if no setting can be changed at all."""
    try:
        # The model's own setting is loaded like any other: so that all begin alike, and to see that it can be done.
        model.use(apply_candidate(candidate, model.config))
    except ServerError as error:
        if is_own:
            raise
        return Trial(candidate, error=f"cannot be loaded: {error.message}")
    try:
        results = asyncio.run(run_bench(bench_options(options), _LevelWatcher(watcher)))
    except ServerError as error:
        if is_own:
            raise
        return Trial(candidate, error=error.message)
    points = [point_of(level, options.percentile) for level in results.levels]
    return judge(candidate, points, options.limit_us)


class _LevelWatcher:
    """Passes on which level begins; the rest of the bench's news is for its own reports."""

    def __init__(self, watcher: TuneWatcher) -> None:
        self._watcher = watcher

    def level_began(self, value: float) -> None:
        self._watcher.level_began(int(value))

    def window_began(self, trial: int, seconds: float) -> None:
        pass

    def window_ended(self, trial: int, window: Window) -> None:
        pass

    def level_ended(self, level: LevelResult) -> None:
        pass


def bench_options(options: TuneOptions) -> BenchOptions:
    """How one candidate is measured: all levels of load, until one is over the limit."""
    endpoint = endpoint_at(options.url, is_grpc=options.is_grpc)
    return BenchOptions(
        model=options.model,
        is_grpc=options.is_grpc,
        address=endpoint.address,
        load=LoadOptions(values=tuple(float(count) for count in sorted(options.concurrencies)), num_workers=1),
        measurement=MeasurementOptions(
            interval_s=options.window_s,
            max_trials=6,
            stability=Stability(percentage=15.0, percentile=options.percentile, latency_limit_us=options.limit_us),
            num_warmup_requests=NUM_WARMUP,
        ),
        request=RequestOptions(data=options.data, headers=endpoint.headers),
    )


def with_url(options: TuneOptions, url: str) -> TuneOptions:
    """The same run on another server."""
    return replace(options, url=url)
