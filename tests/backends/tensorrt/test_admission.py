"""What is refused before a GPU is asked for: devices that engines do not run on, and engines that clients bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from modelserver_backends.tensorrt.backend import TensorRTBackend
from support.engines import context_with, plan_bytes
from support.onnx_models import identity_model

from modelserver.backend import BackendContext, ConfigError, UnavailableError, UnsupportedError

IO = (
    'input [ { name: "in" data_type: TYPE_FP32 dims: [ 16 ] } ] '
    'output [ { name: "out" data_type: TYPE_FP32 dims: [ 16 ] } ] max_batch_size: 4 '
)


def plan_model(tmp_path: Path, text: str = "", **options: str) -> BackendContext:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.plan").write_bytes(plan_bytes())
    return context_with(IO + text, directory, options=options)


def load(context: BackendContext) -> None:
    TensorRTBackend(context).load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'instance_group [ { name: "g" secondary_devices [ { kind: KIND_NVDLA device_id: 1 } ] } ]',
            "group 'g': secondary device KIND_NVDLA 1: .* not by DLA cores; remove secondary_devices",
        ),
        (
            'parameters { key: "enable_multi_device" value { string_value: "true" } }',
            "an engine is run by one GPU here; remove it",
        ),
    ],
)
def test_devices_that_run_no_engines_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(plan_model(tmp_path, text))


@pytest.mark.tool("no-gpu")
def test_an_uploaded_engine_needs_the_operators_word(tmp_path: Path) -> None:
    context = replace(plan_model(tmp_path), is_uploaded=True)
    for use in (load, TensorRTBackend.complete_config):
        with pytest.raises(UnsupportedError, match=r"came with the request .*tensorrt,allow-native-code=true"):
            use(context)
    with pytest.raises(UnavailableError, match="supports only GPU device"):
        load(replace(context, options={"allow-native-code": "true"}))


@pytest.mark.tool("no-gpu")
def test_an_uploaded_onnx_file_is_no_code(tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    with pytest.raises(UnavailableError, match="supports only GPU device"):
        load(context_with("max_batch_size: 4", directory, is_uploaded=True))
