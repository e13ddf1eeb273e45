"""`modelserver batch`: files of rows through a model, into files of answers."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from modelserver.cli.output import Url, print_error, print_json, print_line
from modelserver.errors import InvalidArgumentError, UnavailableError

# As sendmail's: try again later.
EXIT_TO_BE_CONTINUED = 75
_LINE_EVERY_S = 10.0
_DRAW_EVERY_S = 0.25


def batch(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Files, patterns or directories of .jsonl, .csv, .parquet, .arrow; s3://, gs://, as:// too."
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="Directory or prefix of an object store for the parts.")
    ],
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Model whose inputs are columns. Without it rows are OpenAI's requests."),
    ] = "",
    model_version: Annotated[str, typer.Option("--version", help="Version; default: the newest ready one.")] = "",
    url: Url = "",
    model_repository: Annotated[
        list[str] | None,
        typer.Option(help="Serve this repository in this process, in place of a server. Repeatable."),
    ] = None,
    mapping: Annotated[
        list[str] | None, typer.Option("--map", help="COLUMN=INPUT or OUTPUT=COLUMN; default: by name. Repeatable.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Column that the output leaves out. Repeatable.")] = None,
    binary: Annotated[list[str] | None, typer.Option(help="Column of an output that is bytes, not text.")] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="jsonl, csv, parquet or arrow; default: that of the input.")
    ] = "",
    rows_per_request: Annotated[
        int, typer.Option("--batch-size", min=0, help="Rows in one request; 0: what the model takes, up to 64.")
    ] = 0,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, or 'auto'.")] = "auto",
    rows_per_shard: Annotated[
        int, typer.Option(min=1, help="Rows of a part; of Parquet and Arrow whole groups.")
    ] = 10_000,
    shard: Annotated[
        str, typer.Option(help="I/N: work on every N-th part only, from the I-th. Without it workers share all parts.")
    ] = "",
    lease: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which the part of a lost worker is taken.")
    ] = 60.0,
    flush: Annotated[float, typer.Option(min=0.01, help="Seconds of work that a kill may cost.")] = 5.0,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds for requests in flight after SIGTERM.")] = 20.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 600.0,
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds for which the server may be out of reach.")] = 300.0,
    max_failed: Annotated[int, typer.Option(min=0, help="Stop when more rows have failed; 0: never.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Start over, whatever the output has.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Answer files of rows offline: JSON lines, CSV, Parquet, Arrow; resumed after a kill.

    Run the same command again to go on, or several times at once to share the work.
    Exit code 75: not complete, to be run again (SIGTERM, no server). Rows that failed are in OUTPUT/errors.
    """
    # Here, because the other commands need none of it and should answer at once.
    from modelserver.batch.concurrency import Concurrency
    from modelserver.batch.engine import Ending, RunOptions
    from modelserver.batch.plan import BatchOptions, prepared
    from modelserver.batch.targets import ProcessTarget, ServerTarget, Target
    from modelserver.client.endpoint import endpoint_at

    if not url and not model_repository:
        raise InvalidArgumentError("say who answers: --url of a server, or --model-repository to serve in this process")
    options = BatchOptions(
        inputs=inputs,
        output=output,
        model=model,
        version=model_version,
        pairs=mapping or [],
        dropped=drop or [],
        binary=binary or [],
        format=output_format,
        rows_per_shard=rows_per_shard,
        share=_share(shard),
        lease_s=lease,
        starts_over=force,
    )
    run_options = RunOptions(rows_per_request, flush, grace, patience, max_failed)
    limit = _limit(concurrency)
    target: Target
    if model_repository:
        target = ProcessTarget({"model_repository": tuple(model_repository), "exit_on_error": False})
    else:
        target = ServerTarget(endpoint_at(url, is_grpc=False), timeout)

    async def work() -> tuple[Ending, dict[str, Any]]:
        await target.start()
        try:
            made = Concurrency(limit, is_fixed=True) if limit else Concurrency()
            job, run = await prepared(options, target, made, run_options)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, run.stop)
            progress = Progress(job.manifest.num_rows, lambda: run.num_rows_done, lambda: run.limit, time.monotonic)
            drawing = asyncio.create_task(_draw(progress))
            try:
                ending = await run.run()
            finally:
                drawing.cancel()
                if sys.stderr.isatty():
                    sys.stderr.write("\r\x1b[2K")
            counts = job.manifest.counts
            return ending, {
                "state": ending.value,
                "output": output,
                "rows": job.manifest.num_rows,
                "answered": run.num_answered,
                "failed": run.num_failed,
                "recovered": run.num_recovered,
                "total_answered": counts.num_answered,
                "total_failed": counts.num_failed,
                "seconds": round(time.monotonic() - progress.start_s, 3),
            }
        finally:
            await target.stop()

    ending, result = _run(work)
    if as_json:
        print_json(result)
    else:
        print_line(_sentence(ending.value, result))
    if ending in (Ending.STOPPED, Ending.UNREACHABLE):
        raise typer.Exit(EXIT_TO_BE_CONTINUED)
    if ending is Ending.TOO_MANY_FAILED:
        print_error(f"more than {max_failed} rows failed; {output}/errors has those of whole parts")
        raise typer.Exit(1)


def _run(work: Callable[[], Any]) -> Any:
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work())
    except UnavailableError as error:
        print_error(error.message)
        raise typer.Exit(EXIT_TO_BE_CONTINUED) from None


def _share(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, slash, count = text.partition("/")
    if not slash or not first.isdigit() or not count.isdigit() or not int(first) < int(count):
        raise InvalidArgumentError(f"--shard expects I/N with I from 0 to N-1, got '{text}'")
    return int(first), int(count)


def _limit(text: str) -> int:
    """0 for auto."""
    if text == "auto":
        return 0
    if not text.isdigit() or not int(text):
        raise InvalidArgumentError(f"--concurrency expects a number or 'auto', got '{text}'")
    return int(text)


def _sentence(state: str, result: dict[str, Any]) -> str:
    rate = (result["answered"] + result["failed"]) / max(result["seconds"], 1e-3)
    own = f"{result['answered']} rows answered, {result['failed']} failed, {result['seconds']:.1f} s, {rate:.1f} rows/s"
    if state == "completed":
        return f"completed: {result['total_answered']} rows answered, {result['total_failed']} failed (here: {own})"
    if state == "share_done":
        return f"this worker's share is done: {own}"
    return f"{state}: {own}; run the same command again to go on"


@dataclass
class Progress:
    """Rows that are done, their rate over the last seconds, and the time that the others take at that rate."""

    num_rows: int
    num_done: Callable[[], int]
    limit: Callable[[], int]
    now_s: Callable[[], float]

    def __post_init__(self) -> None:
        self.start_s = self.now_s()
        self._marks = [(self.start_s, self.num_done())]

    def line(self, width: int = 0) -> str:
        """The state in words; with a `width`, behind a bar of that many letters."""
        now_s, done = self.now_s(), self.num_done()
        self._marks.append((now_s, done))
        while len(self._marks) > 2 and now_s - self._marks[1][0] > _LINE_EVERY_S:
            del self._marks[0]
        since_s, before = self._marks[0]
        rate = (done - before) / (now_s - since_s) if now_s > since_s else 0.0
        left = _duration((self.num_rows - done) / rate) if rate else "-"
        share = done / self.num_rows if self.num_rows else 1.0
        filled = round(width * share)
        bar = f"[{'#' * filled}{'.' * (width - filled)}] " if width else ""
        return (
            f"{bar}{done:,} of {self.num_rows:,} rows ({share:.1%}), {rate:,.1f} rows/s, {left} left, "
            f"{self.limit()} in flight"
        )


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


async def _draw(progress: Progress) -> None:
    """A bar on a terminal, else a line from time to time, on standard error."""
    is_terminal = sys.stderr.isatty()
    while True:
        await asyncio.sleep(_DRAW_EVERY_S if is_terminal else _LINE_EVERY_S)
        text = progress.line(30 if is_terminal else 0)
        sys.stderr.write(f"\r\x1b[2K{text}" if is_terminal else f"{text}\n")
        sys.stderr.flush()
