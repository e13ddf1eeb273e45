"""Plans a job: finds its inputs, cuts them into shards, and compares their columns with the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from modelserver.batch.columns import ColumnMap, ModelShape
from modelserver.batch.concurrency import Concurrency
from modelserver.batch.engine import Run, RunOptions
from modelserver.batch.formats import FORMATS, SUFFIXES, Format, format_of
from modelserver.batch.job import Input, Job, Manifest, Owner, Shard, digest_of
from modelserver.batch.kinds import ColumnRows, RequestRows, RowKind
from modelserver.batch.places import InputFile, find_inputs, open_place
from modelserver.batch.targets import Target
from modelserver.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What a job is. Without a `model` rows are requests in OpenAI's shape. `share` (i, n): every n-th shard."""

    inputs: list[str]
    output: str
    model: str = ""
    version: str = ""
    pairs: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    binary: list[str] = field(default_factory=list)
    format: str = ""
    rows_per_shard: int = 10_000
    share: tuple[int, int] | None = None
    lease_s: float = 60.0
    starts_over: bool = False


async def prepared(
    options: BatchOptions, target: Target, concurrency: Concurrency, run_options: RunOptions
) -> tuple[Job, Run]:
    """The job, begun or continued, and a worker for it. Raises ServerError."""
    shape = await target.model(options.model, options.version) if options.model else None
    return await asyncio.to_thread(_prepared, options, target, concurrency, run_options, shape)


def _prepared(
    options: BatchOptions, target: Target, concurrency: Concurrency, run_options: RunOptions, shape: ModelShape | None
) -> tuple[Job, Run]:
    # The output may lie in a directory of inputs.
    own = options.output.rstrip("/") + "/"
    files = [file for file in find_inputs(options.inputs, SUFFIXES) if not file.name.startswith(own)]
    source, output = _formats(files, options)
    columns = None
    kind: RowKind
    if shape is None:
        kind = RequestRows()
    else:
        columns = ColumnMap(shape, options.pairs, dropped=options.dropped, binary=options.binary)
        kind = ColumnRows(columns, output)
    inputs = [Input(file.name, file.size_bytes, file.tag) for file in files]
    settings: dict[str, Any] = {
        "map": options.pairs,
        "drop": options.dropped,
        "binary": options.binary,
        "format": output.suffix,
        "rows_per_shard": options.rows_per_shard,
    }
    model: dict[str, Any] = shape.document() if shape is not None else {}

    def plan() -> Manifest:
        return Manifest(inputs, settings, model, _shards(files, source, options.rows_per_shard, columns)).seal()

    worker = "" if options.share is None else f"shard {options.share[0]} of {options.share[1]}"
    job = Job.open(
        open_place(options.output),
        plan,
        digest_of(inputs, settings, model),
        starts_over=options.starts_over,
        owner=Owner.here(worker),
        suffix=output.suffix,
        lease_s=options.lease_s,
    )
    first, step = options.share or (0, 1)
    scope = range(first, len(job.manifest.shards), step)
    return job, Run(job, target, kind, source, concurrency, run_options, scope)


def _formats(files: Sequence[InputFile], options: BatchOptions) -> tuple[Format, Format]:
    """The format of the inputs, and that of the parts."""
    found = {format_of(file.name) for file in files}
    if len(found) > 1:
        raise InvalidArgumentError(f"the inputs have several formats: {', '.join(sorted(found))}; give one job each")
    source = found.pop()
    wanted = options.format or source
    if wanted not in FORMATS:
        raise InvalidArgumentError(f"--format expects one of {', '.join(FORMATS)}, got '{wanted}'")
    if not options.model and (source, wanted) != ("jsonl", "jsonl"):
        raise InvalidArgumentError(
            f"requests in OpenAI's shape are lines of JSON, and so are their answers, not {source} and {wanted}; "
            "--model says whose inputs the columns are"
        )
    return FORMATS[source], FORMATS[wanted]


def _shards(files: Sequence[InputFile], source: Format, num_rows: int, columns: ColumnMap | None) -> list[Shard]:
    """All pieces of all files; the first rows are compared with the model."""
    shards = []
    for number, file in enumerate(files):
        with file.local() as path:
            pieces = list(source.pieces(path, num_rows))
            if columns is not None and pieces:
                for row in islice(source.rows(path, pieces[0]), 1):
                    if not row.problem:
                        columns.check(row.columns)
        shards += [Shard(number, piece.start, piece.end, piece.num_rows) for piece in pieces]
    return shards
