"""One run from its options to its results: read the model's interface, prepare the requests, measure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from modelserver.bench.encode import RequestForm
from modelserver.bench.fleet import Fleet
from modelserver.bench.input_data import Step, read_data
from modelserver.bench.interface import Interface, read_interface
from modelserver.bench.options import BenchOptions, LoadOptions, Mode
from modelserver.bench.profiler import Profiler, Watcher
from modelserver.bench.results import Results
from modelserver.bench.server_statistics import Sample, Scraper, ServerCounts, read_counts
from modelserver.bench.shared_regions import Regions
from modelserver.bench.work import Template, Transport, Work
from modelserver.client.control import ControlClient
from modelserver.client.endpoint import Endpoint
from modelserver.client.heads import GrpcRequestHead, HttpRequestHead, model_path
from modelserver.errors import InvalidArgumentError

MAX_WORKERS = 16


async def run_bench(options: BenchOptions, watcher: Watcher) -> Results:
    """Measure. Raises ServerError for what keeps the run from starting; failures of requests are in the results."""
    control = Endpoint(options.address, options.is_grpc, options.request.headers).control()
    interface = await asyncio.to_thread(read_interface, control, options.model, options.version)
    _check(options, interface)
    streams = read_data(interface, options.request.data)
    async with Regions(options.request, control, interface) as regions:
        streams = await regions.place(streams)
        work = make_work(options, interface, streams, regions)
        return await _measure(options, control, interface, work, watcher)


async def _measure(
    options: BenchOptions, control: ControlClient, interface: Interface, work: Work, watcher: Watcher
) -> Results:
    async def counts() -> ServerCounts | None:
        return await asyncio.to_thread(read_counts, control, interface, options.composing)

    num_workers = count_workers(options.load)
    scraper = Scraper(options.metrics.address, options.metrics.path, options.metrics.interval_s)
    results = Results(options, interface, num_workers)
    try:
        if options.metrics.is_collected:
            await scraper.start()
        async with Fleet(num_workers) as fleet:
            await fleet.set_up(work)
            profiler = Profiler(
                options,
                fleet,
                read_counts=counts,
                take_samples=scraper.take if options.metrics.is_collected else _no_samples,
                watcher=watcher,
                has_sequences=work.sequences is not None,
            )
            results.levels = await profiler.run()
    finally:
        await scraper.stop()
    return results


def _no_samples() -> list[Sample]:
    return []


def _check(options: BenchOptions, interface: Interface) -> None:
    """Raises InvalidArgumentError for options that do not fit the model."""
    if interface.is_decoupled and not options.is_streaming:
        raise InvalidArgumentError(
            f"model '{interface.name}' is decoupled: it answers on a stream; add -i grpc --streaming"
        )
    sequences = options.load.sequences
    if interface.is_sequence and sequences.end_id is not None:
        num_ids = sequences.end_id - sequences.first_id
        num_live = (
            int(options.load.levels.end or options.load.levels.start)
            if options.load.mode is Mode.CONCURRENCY
            else options.load.num_sequences
        )
        if num_ids < num_live:
            raise InvalidArgumentError(
                f"--sequence-id-range has {num_ids} ids for {num_live} sequences at once: widen it"
            )


def count_workers(load: LoadOptions) -> int:
    """The number of load processes: the user's choice, else half of the CPUs; at most one per concurrent request."""
    if load.mode is Mode.PERIODIC:
        return 1
    wanted = load.num_workers if load.num_workers is not None else max(1, len(os.sched_getaffinity(0)) // 2)
    most = load.levels.start if load.mode is Mode.CONCURRENCY else load.num_sequences
    return max(1, min(wanted, MAX_WORKERS, int(most)))


def make_work(options: BenchOptions, interface: Interface, streams: Sequence[Sequence[Step]], regions: Regions) -> Work:
    """The encoded requests."""
    request = options.request
    transport = Transport.STREAM if options.is_streaming else Transport.GRPC if options.is_grpc else Transport.HTTP
    form = RequestForm(
        model=options.model,
        version=options.version,
        has_sequence=interface.is_sequence,
        parameters=request.parameters,
        outputs=regions.outputs,
        is_input_json=request.is_input_json,
        is_output_json=request.is_output_json,
    )
    head = HttpRequestHead(
        options.address, "POST", model_path(options.model, options.version) + "/infer", request.headers
    )
    method = "ModelStreamInfer" if options.is_streaming else "ModelInfer"

    def encode(step: Step) -> Template:
        if transport is Transport.HTTP:
            return form.http(head, step.inputs, step.expected)
        return form.grpc(step.inputs, step.expected, asks_for_final=interface.is_decoupled)

    return Work(
        transport=transport,
        address=options.address,
        streams=tuple(tuple(encode(step) for step in stream) for stream in streams),
        fields=GrpcRequestHead(options.address, method, request.headers, request.algorithm).fields,
        output_names=tuple(spec.name for spec in interface.outputs),
        is_decoupled=interface.is_decoupled,
        algorithm=request.algorithm,
        frame_bytes=request.frame_bytes,
        lanes_per_connection=options.load.lanes_per_connection,
        sequences=options.load.sequences if interface.is_sequence else None,
        seed=options.load.seed,
    )
