"""Pickles are told from archives by content, and never loaded unless the operator allows it."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from modelserver_backends.pytorch.archive import FileKind, file_kind, names_tensorrt, refuse_code
from support.contexts import context_of, instance_of, tensors
from support.torch_models import Copy, path_in, rewritten, write_export, write_script

from modelserver.backend import Datatype, InvalidArgumentError, ModelConfig, UnavailableError, UnsupportedError
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import ModelInput, ModelOutput

CONFIG = ModelConfig(
    input=tensors(ModelInput, x=(Datatype.FP32, (2,))), output=tensors(ModelOutput, y=(Datatype.FP32, (2,)))
)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


def load(directory: Path, **options: str) -> object:
    return find_backend("pytorch").complete_config(context_of(directory, options=options))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_checkpoint_is_refused_before_it_runs(tmp_path: Path, sprung: Path, legacy: bool) -> None:
    torch.save(Trap(sprung), path_in(tmp_path, "model.pt"), _use_new_zipfile_serialization=not legacy)
    assert file_kind(path_in(tmp_path, "model.pt")) is FileKind.PICKLE
    with pytest.raises(UnsupportedError, match=r"is a pickled checkpoint .*--backend-config=pytorch,allow-pickle=true"):
        load(tmp_path)
    assert not sprung.exists()


def test_a_checkpoint_is_served_when_allowed(tmp_path: Path) -> None:
    torch.save(Copy(), path_in(tmp_path, "model.pt"))
    instance = instance_of("pytorch", context_of(tmp_path, config=CONFIG, options={"allow-pickle": "true"}))
    assert instance.run({"x": np.ones(2, np.float32)})["y"].tolist() == [1, 1]


def test_weights_without_code_cannot_be_served(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1).state_dict(), path_in(tmp_path, "model.pt"))
    with pytest.raises(UnsupportedError, match="holds a OrderedDict, not a module: weights without the code"):
        load(tmp_path, **{"allow-pickle": "true"})


def test_archives_are_what_they_are_whatever_their_name(tmp_path: Path) -> None:
    assert file_kind(path_in(write_script(tmp_path, Copy()), "model.pt")) is FileKind.TORCHSCRIPT
    exported = path_in(write_export(tmp_path, Copy(), torch.ones(2)), "model.pt2")
    assert file_kind(exported.rename(exported.with_name("other.pt"))) is FileKind.EXPORTED


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "starts with b''"), (b"GGUF", "starts with b'GGUF'"), (b"PK\3\4", "truncated archive")],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=reason):
        file_kind(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "records", [["a/data/aotinductor/model/x.so"], ["a/models/model.json", "a/data/aotinductor/m/x.so"]]
)
def test_an_archive_with_a_library_is_a_package(tmp_path: Path, records: list[str]) -> None:
    write_archive(path_in(tmp_path, "model.pt2"), dict.fromkeys(records, b""))
    assert file_kind(path_in(tmp_path, "model.pt2")) is FileKind.PACKAGE
    with pytest.raises(
        UnsupportedError, match=r'a library that can do anything; .*platform: "torch_aoti".*native-code'
    ):
        load(tmp_path)


def test_other_archives_are_refused(tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt2", {"a/readme.txt": b""})
    with pytest.raises(InvalidArgumentError, match="zip archive"):
        file_kind(tmp_path / "model.pt2")


@pytest.mark.parametrize(
    ("filename", "record", "text"),
    [
        ("model.pt", "m/code/__torch__/m.py", b"ops.tensorrt.execute_engine([x], self.engine)"),
        ("model.pt2", "m/models/model.json", b'{"target": "torch.ops.tensorrt.execute_engine.default"}'),
    ],
)
def test_a_module_of_torch_tensorrt_names_what_it_needs(
    tmp_path: Path, filename: str, record: str, text: bytes
) -> None:
    write_archive(path_in(tmp_path, filename), {"m/constants.pkl": b"", record: text})
    assert names_tensorrt(path_in(tmp_path, filename))
    with pytest.raises(
        UnavailableError, match=r"compiled by Torch-TensorRT, .*: pip install torch-tensorrt, in the version"
    ):
        load(tmp_path)


def test_other_modules_do_not_need_it(model_repository: Path) -> None:
    for path in ("digits_export/1/model.pt2", "digits_torchscript/1/model.pt"):
        assert not names_tensorrt(model_repository / path)


def write_archive(path: Path, records: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def test_a_clean_exported_program_passes(model_repository: Path) -> None:
    refuse_code(model_repository / "digits_export/1/model.pt2")


def trapped_samples(sprung: Path, directory: Path) -> dict[str, bytes]:
    torch.save(((Trap(sprung),), {}), directory / "samples")
    return {"data/sample_inputs/model.pt": (directory / "samples").read_bytes()}


def trapped_constant(sprung: Path, directory: Path) -> dict[str, bytes]:
    config = {
        "config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}
    }
    return {
        "data/constants/model_constants_config.json": json.dumps(config).encode(),
        "data/constants/opaque_obj_0": pickle.dumps(Trap(sprung)),
    }


def trapped_weight(sprung: Path, directory: Path) -> dict[str, bytes]:
    torch.save(Trap(sprung), directory / "weight")
    payload = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
    config = {"config": {"w": payload}}
    return {
        "data/weights/model_weights_config.json": json.dumps(config).encode(),
        "data/weights/weight_0": (directory / "weight").read_bytes(),
    }


@pytest.mark.parametrize("trap", [trapped_samples, trapped_constant, trapped_weight])
def test_a_pickle_inside_an_exported_program_is_refused(tmp_path: Path, sprung: Path, trap) -> None:
    path = path_in(write_export(tmp_path, Copy(), torch.ones(2)), "model.pt2")
    rewritten(path, trap(sprung, tmp_path))
    with pytest.raises(UnsupportedError, match=r"holds a pickle in 'data/.*--backend-config=pytorch,allow-pickle=true"):
        load(tmp_path)
    assert not sprung.exists()


def test_the_traps_are_real(tmp_path: Path, sprung: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = path_in(write_export(tmp_path, Copy(), torch.ones(2)), "model.pt2")
    rewritten(path, trapped_samples(sprung, tmp_path))
    with pytest.raises((InvalidArgumentError, AttributeError, TypeError)):
        load(tmp_path, **{"allow-pickle": "true"})
    assert sprung.exists()
