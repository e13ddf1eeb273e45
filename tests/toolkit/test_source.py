"""What can be converted is recognised by its content; what cannot is explained."""

import pickle
import zipfile
from pathlib import Path

import pytest
from support.onnx_models import identity_model

from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError, UnsupportedError
from modelserver.toolkit.loaded_model import define
from modelserver.toolkit.source import SourceKind, file_kind, open_source
from modelserver.toolkit.tensor_spec import ModuleOptions, parse_tensor_spec

IMAGE = ModuleOptions((parse_tensor_spec("image:FP32:8,8"),))


@pytest.mark.parametrize(
    ("name", "kind", "version"),
    [
        ("digits_onnx", SourceKind.ONNX, 1),
        ("digits_export", SourceKind.EXPORTED, 1),
        ("digits_torchscript", SourceKind.TORCHSCRIPT, 1),
        ("digits_versions", SourceKind.ONNX, 3),
    ],
)
def test_directories_and_their_files(
    model_repository: Path, tmp_path: Path, name: str, kind: SourceKind, version: int
) -> None:
    source = open_source(str(model_repository / name), tmp_path, ModuleOptions())
    assert (source.kind, source.version) == (kind, version)
    lone = open_source(str(source.path), tmp_path / "lone", IMAGE)
    assert lone.kind is kind
    assert lone.directory.name == str(version)
    config = define(lone.directory).config
    assert [(spec.name, spec.data_type, spec.dims) for spec in config.input] == [("image", Datatype.FP32, (8, 8))]


def test_external_weights_come_along_but_not_from_elsewhere(tmp_path: Path) -> None:
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, ["b", 4])],
        [helper.make_tensor_value_info("y", 1, ["b", 4])],
        [weight],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / "big.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    source = open_source(str(path), tmp_path / "work", ModuleOptions())
    assert sorted(file.name for file in source.path.parent.iterdir()) == ["model.onnx", "w.bin"]

    structure = onnx.load(str(path), load_external_data=False)
    structure.graph.initializer[0].external_data[0].value = "../secret"
    path.write_bytes(structure.SerializeToString())
    (tmp_path / "secret").write_bytes(b"0" * 64)
    with pytest.raises(InvalidArgumentError, match="outside of its directory"):
        open_source(str(path), tmp_path / "again", ModuleOptions())
    structure.graph.initializer[0].external_data[0].value = "absent"
    path.write_bytes(structure.SerializeToString())
    with pytest.raises(InvalidArgumentError, match="not beside it"):
        open_source(str(path), tmp_path / "third", ModuleOptions())


def test_wrong_sources_are_explained(tmp_path: Path, model_repository: Path) -> None:
    def check(text: object, kind: type[ServerError], reason: str) -> None:
        with pytest.raises(kind, match=reason):
            open_source(str(text), tmp_path / "work", ModuleOptions())

    empty = tmp_path / "empty"
    empty.mkdir()
    bare = identity_model(tmp_path / "bare", ["b", 2])
    (bare / "1" / "model.onnx").rename(bare / "1" / "other.bin")
    (tmp_path / "code.py").write_text("")
    check(tmp_path / "absent.onnx", NotFoundError, "there is no model at")
    check(empty, InvalidArgumentError, "not a model directory")
    check(bare, InvalidArgumentError, "holds none of model.onnx")
    check(tmp_path / "code.py", InvalidArgumentError, "say which module or function")
    check(model_repository / "add_sub", InvalidArgumentError, "only ONNX and PyTorch")
    check(
        model_repository / "digits_torchscript/1/model.pt",
        InvalidArgumentError,
        r"forward\(image\), such as --input image:FP32",
    )
    with pytest.raises(NotFoundError, match="no version 9"):
        open_source(str(model_repository / "digits_onnx"), tmp_path, ModuleOptions(), version=9)


def test_files_of_other_kinds(tmp_path: Path, model_repository: Path) -> None:
    def written(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    whole = (model_repository / "digits_export/1/model.pt2").read_bytes()
    with pytest.raises(UnsupportedError, match="is a pickle"):
        file_kind(written("a.pt", pickle.dumps({})))
    with pytest.raises(InvalidArgumentError, match="truncated"):
        file_kind(written("b.pt2", whole[: len(whole) // 2]))
    with pytest.raises(InvalidArgumentError, match="is empty"):
        file_kind(written("c.onnx", b""))
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        archive.writestr("readme.txt", "")
    with pytest.raises(InvalidArgumentError, match="neither TorchScript nor"):
        file_kind(tmp_path / "d.zip")
    with zipfile.ZipFile(tmp_path / "e.pt", "w") as archive:
        archive.writestr("x/data.pkl", "")
    with pytest.raises(UnsupportedError, match="is a pickle"):
        file_kind(tmp_path / "e.pt")
    with zipfile.ZipFile(tmp_path / "f.pt2", "w") as archive:
        archive.writestr("x/data/aotinductor/model/a.so", "")
    with pytest.raises(UnsupportedError, match="compiled for one machine"):
        file_kind(tmp_path / "f.pt2")
    with pytest.raises(InvalidArgumentError, match="is not an ONNX model"):
        open_source(str(written("g.onnx", b"garbage!")), tmp_path / "work", ModuleOptions())
