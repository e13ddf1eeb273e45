"""`python -m benchmarks.core_loop KIND FILE REPOSITORY MODEL INSTANCES SECONDS`: a backend behind the core, no socket.

The whole server in this process. Two requests for each instance go to its data plane, as a frontend's do: checked,
queued, executed by the worker of an instance, recorded and delivered to the event loop, which then sends the next.
In turns with as many bare loops over FILE in the same process, a second each: what others do to the machine, and what
it does by itself, then happens to both. Prints JSON: a list of pairs, each of the bare loops' slice and the core's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import uvloop

from benchmarks.bare_loop import Slice, bare_call, image, run_loops
from modelserver.app.server import Server
from modelserver.core.datatype import Datatype
from modelserver.core.interpreter import keep_for_good
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.options.server_options import ServerOptions
from modelserver.planes.data import DataPlane

_SLICE_S = 1.0


class _ClosedLoop:
    """Keeps requests in flight, and counts the answers."""

    def __init__(self, dataplane: DataPlane, model: str) -> None:
        self._dataplane = dataplane
        self._model = model
        self._image = image()
        self._image.setflags(write=False)  # as received bytes are
        self._count = 0
        self._num_inflight = 0
        self._is_over = False
        self._end: asyncio.Future[None]

    async def run(self, concurrency: int, seconds: float) -> Slice:
        """So many at a time for so long; what has begun by then is counted."""
        self._count, self._is_over = 0, False
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        loop.call_later(seconds, self._stop)
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(concurrency):
            self._send()
        await self._end
        return Slice(self._count, time.perf_counter() - started, time.process_time() - cpu_started)

    def _stop(self) -> None:
        self._is_over = True

    def _send(self) -> None:
        self._num_inflight += 1
        request = InFlightRequest(
            model_name=self._model, version=None, inputs={"image": Tensor("image", Datatype.FP32, self._image)}
        )
        self._dataplane.infer(request).subscribe(self._answered)

    def _answered(self, response: InferResponse) -> None:
        self._num_inflight -= 1
        if response.error is not None:
            self._end.set_exception(response.error)
            return
        self._count += 1
        if not self._is_over:
            self._send()
        elif self._num_inflight == 0:
            self._end.set_result(None)


async def run(
    call: Callable[[], object], repository: str, model: str, num_instances: int, seconds: float
) -> list[tuple[Slice, Slice]]:
    options = ServerOptions(
        model_repository=(repository,),
        model_control_mode="explicit",
        load_model=(model,),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    server = Server(options)
    await server.start()
    keep_for_good()  # as `Server.serve`
    load = _ClosedLoop(server.dataplane, model)
    concurrency = 2 * num_instances
    await load.run(concurrency, _SLICE_S / 2)
    pairs = []
    for _ in range(max(1, round(seconds / _SLICE_S))):
        bare = await asyncio.to_thread(run_loops, call, num_instances, _SLICE_S)
        pairs.append((bare, await load.run(concurrency, _SLICE_S)))
    await server.stop()
    return pairs


def main() -> None:
    kind, path, repository, model = sys.argv[1:5]
    num_instances, seconds = int(sys.argv[5]), float(sys.argv[6])
    call = bare_call(kind, path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pairs = runner.run(run(call, repository, model, num_instances, seconds))
    print(json.dumps([[asdict(part) for part in pair] for pair in pairs]))


if __name__ == "__main__":
    main()
