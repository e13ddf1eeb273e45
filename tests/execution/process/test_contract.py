"""A backend of a third party whose instances live in child processes: it imports the contract and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from support.batching import batching_config, load_model, request

from modelserver.backend import Backend, BackendContext, BatchInstance, Placement
from modelserver.backend.process import ProcessInstance, ProcessOptions, Recipe, call_in_process, num_instances

TESTS = (str(Path(__file__).resolve().parent.parent.parent),)


class Remote(Backend):
    has_processes = True

    def create_instance(self, placement: Placement) -> BatchInstance:
        recipe = Recipe("support.contract_child:create_instance", {"factor": 3.0}, TESTS)
        options = ProcessOptions(is_wanted=self.context.is_wanted)
        return ProcessInstance.of_model(self.context, placement, recipe, options)


async def test_a_backend_hosts_its_instances_in_child_processes() -> None:
    loop = asyncio.get_running_loop()
    model = await asyncio.to_thread(load_model, Remote, batching_config(), loop)
    try:
        response = await model.submit(request(value=2.0)).only()
        assert float(np.asarray(response.outputs[0].data).flat[0]) == 6.0
        [info] = model.instances()
        assert info.pid is not None
    finally:
        await asyncio.to_thread(model.close)


def test_a_function_is_called_in_a_process_of_its_own() -> None:
    recipe = Recipe("support.contract_child:product", {"numbers": [2, 3, 7]}, TESTS)
    assert call_in_process("product", recipe, timeout_s=60, environment={}) == 42


def test_instances_are_counted_from_the_config(tmp_path: Path) -> None:
    context = BackendContext("m", 1, batching_config(), tmp_path, tmp_path)
    assert num_instances(context) == 1
