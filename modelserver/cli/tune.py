"""`modelserver tune`: measures settings of a model on a server, ranks them, and writes the best as config.pbtxt."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelserver.cli.convert import Data, LabelOutput, sample_options
from modelserver.cli.output import Steps, print_json, print_line, print_table
from modelserver.client.address import URL_VARIABLE
from modelserver.client.server_client import DEFAULT_URL
from modelserver.core.numerals import parse_int
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, ServerError
from modelserver.toolkit.tuning.session import TuneWatcher

if TYPE_CHECKING:
    from modelserver.toolkit.tuning.session import TuneOptions, TuneResult
    from modelserver.toolkit.tuning.space import Candidate
    from modelserver.toolkit.tuning.trial import Trial

DEFAULT_GRPC = "localhost:8001"


class Protocol(enum.StrEnum):
    """Protocol of inference requests and of model loads."""

    HTTP = "http"
    GRPC = "grpc"


Url = Annotated[
    str,
    typer.Option(
        "--url",
        "-u",
        envvar=URL_VARIABLE,
        help=f"Address of a server in explicit mode; default: {DEFAULT_URL}, with -i grpc {DEFAULT_GRPC}.",
    ),
]


def tune(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    url: Url = "",
    protocol: Annotated[
        Protocol, typer.Option("--protocol", "-i", help="Protocol of requests and of model loads.")
    ] = Protocol.HTTP,
    model_repository: Annotated[
        Path | None, typer.Option(help="Start a server with this repository for the run, instead of --url.")
    ] = None,
    serve_flag: Annotated[
        list[str] | None,
        typer.Option(metavar="FLAG", help="A flag of that server. Repeatable."),
    ] = None,
    latency_ms: Annotated[float, typer.Option(min=0.0, help="Latency to stay below; 0: none.")] = 0.0,
    percentile: Annotated[float, typer.Option(min=0.0, max=100.0, help="Of the latency; 0: the mean.")] = 99.0,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1,4,16",
    instances: Annotated[str, typer.Option(metavar="N,...", help="Instance counts to try.")] = "",
    batch_sizes: Annotated[str, typer.Option(metavar="N,...", help="Largest batches to try.")] = "",
    delays_us: Annotated[str, typer.Option(metavar="N,...", help="Queue delays to try.")] = "",
    threads: Annotated[str, typer.Option(metavar="N,...", help="Threads of an execution to try; 0: default.")] = "",
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Every combination of values.")] = False,
    max_trials: Annotated[int, typer.Option(min=0, help="Maximum number of settings; 0: no limit.")] = 0,
    time_limit: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Start no setting after this time; 0: no limit.")
    ] = 0.0,
    window_ms: Annotated[
        int, typer.Option(min=50, help="Length of a measurement; a level ends when three agree.")
    ] = 500,
    batch: Annotated[int, typer.Option("-b", "--batch-size", min=1, help="Rows of a request.")] = 1,
    input_data: Annotated[
        list[str] | None, typer.Option(metavar="random|zero|PATH", help="As of modelserver bench.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME:DIMS", help="Sizes of variable inputs.")] = None,
    samples: Data = None,
    label_output: LabelOutput = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the best config; default: MODEL.config.pbtxt.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with curves: one page.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the instance count, batching and threads that serve a model best, by measuring them on a running server."""
    # Here, because the other commands need none of it and should answer at once.
    from modelserver.bench.input_data import RANDOM, DataOptions
    from modelserver.toolkit.tensor_spec import parse_shape
    from modelserver.toolkit.tuning.session import TuneOptions
    from modelserver.toolkit.tuning.space import SpaceOptions

    config_file = output if output is not None else Path(f"{model}.config.pbtxt")
    _check_files((config_file, html), force=force)
    if model_repository is not None and not model_repository.is_dir():
        raise InvalidArgumentError(f"--model-repository: directory '{model_repository}' does not exist")
    if serve_flag and model_repository is None:
        raise InvalidArgumentError("--serve-flag is for the server of --model-repository")
    is_grpc = protocol is Protocol.GRPC
    options = TuneOptions(
        model=model,
        url=url or (DEFAULT_GRPC if is_grpc else DEFAULT_URL),
        is_grpc=is_grpc,
        space=SpaceOptions(
            instances=_numbers(instances, "--instances", 1),
            batch_sizes=_numbers(batch_sizes, "--batch-sizes", 1),
            delays_us=_numbers(delays_us, "--delays-us", 0),
            threads=_numbers(threads, "--threads", 0),
        ),
        limit_us=latency_ms * 1e3,
        percentile=percentile or None,
        concurrencies=_numbers(concurrency, "--concurrency", 1),
        data=DataOptions(
            sources=tuple(input_data or (RANDOM,)),
            shapes=dict(parse_shape(text) for text in shape or ()),
            batch_size=batch,
        ),
        is_exhaustive=exhaustive,
        max_trials=max_trials,
        time_limit_s=time_limit,
        window_s=window_ms / 1e3,
        samples=sample_options(samples, shape, label_output),
        directory=model_repository / model if model_repository is not None else None,
    )
    with _Report(is_silent=as_json) as report:
        result = _run(options, model_repository, serve_flag or [], report)
    _finish(result, config_file, html, as_json=as_json)
    raise typer.Exit(1 if result.winner is None or result.end == "interrupted" else 0)


def _check_files(files: tuple[Path | None, ...], *, force: bool) -> None:
    """Raise ServerError for files that cannot be written, before the measurements rather than after them."""
    for file in files:
        if file is None:
            continue
        if file.exists() and not force:
            raise AlreadyExistsError(f"'{file}' already exists: choose another name, or replace it with --force")
        if file.is_dir() or not file.parent.is_dir():
            raise InvalidArgumentError(f"cannot write '{file}': expected the name of a file in a directory that exists")


def _run(options: TuneOptions, repository: Path | None, flags: list[str], report: _Report) -> TuneResult:
    from modelserver.toolkit.tuning.private_server import private_server
    from modelserver.toolkit.tuning.session import tune as run
    from modelserver.toolkit.tuning.session import with_url

    if repository is None:
        return run(options, report)
    report.show("starting a server")
    with private_server(repository, options.model, flags, is_grpc=options.is_grpc) as url:
        return run(with_url(options, url), report)


def _numbers(text: str, flag: str, least: int) -> tuple[int, ...]:
    """Raises InvalidArgumentError."""
    try:
        numbers = tuple(sorted({parse_int(part) for part in text.split(",")})) if text else ()
    except ValueError:
        numbers = (least - 1,)
    if any(number < least for number in numbers):
        raise InvalidArgumentError(f"{flag} expects whole numbers of at least {least} such as 1,2,4, got '{text}'")
    return numbers


class _Report(TuneWatcher):
    """Shows progress on the terminal: a line for each setting, and the current measurement."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._steps = Steps()
        self._now = ""
        self._num_all = 0

    def __enter__(self) -> _Report:
        self._steps.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._steps.__exit__()

    def show(self, step: str) -> None:
        self._steps.show(step)

    def run_began(self, result: TuneResult) -> None:
        self._num_all = result.space.size

    def trial_began(self, number: int, candidate: Candidate) -> None:
        self._now = f"setting {number} (of {self._num_all} at most): {candidate}"
        self.show(self._now)

    def level_began(self, concurrency: int) -> None:
        self.show(f"{self._now}; {concurrency} in flight")

    def trial_ended(self, number: int, trial: Trial) -> None:
        if trial.best is None:
            self._line(f"{number:3}  {trial.candidate}: {trial.error}")
            return
        best = trial.best
        self._line(
            f"{number:3}  {trial.candidate}: {best.throughput:,.0f} infer/s, p99 {best.p99_us / 1e3:.2f} ms "
            f"with {best.concurrency} in flight"
        )

    def comparison_began(self) -> None:
        self.show("comparing the answers before and after")

    def _line(self, text: str) -> None:
        if not self._is_silent:
            print_line(text)


def _finish(result: TuneResult, config_file: Path, html: Path | None, *, as_json: bool) -> None:
    from modelserver.toolkit.comparison import difference_rows
    from modelserver.toolkit.tuning.report import (
        ANSWER_COLUMNS,
        BEFORE_AFTER_COLUMNS,
        COLUMNS,
        before_after_rows,
        html_report,
        notes,
        rank_rows,
        target_text,
        tune_document,
        winning_text,
    )

    if html is not None:
        _write(html, html_report(result))
    if result.winner is not None:
        _write(config_file, winning_text(result))
    if as_json:
        print_json({**tune_document(result), "config_file": str(config_file) if result.winner is not None else None})
        return
    print_line("")
    print_table(COLUMNS, rank_rows(result))
    print_line("")
    rows = before_after_rows(result)
    if rows:
        print_table(BEFORE_AFTER_COLUMNS, rows)
        print_line("")
    if result.parity is not None:
        print_table(ANSWER_COLUMNS, difference_rows(result.parity))
        print_line("")
    for note in notes(result):
        print_line(f"note: {note}")
    if result.winner is None:
        print_line("no setting could be measured")
        return
    print_line(f"looked for: {target_text(result)}")
    print_line(f"best: {result.winner.candidate}; its config is in {config_file}")
    if html is not None:
        print_line(f"report: {html}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ServerError(f"cannot write '{path}': {error.strerror}") from None
