"""ONNX files are read whole, and written without a trace of where they were made."""

from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support.onnx_models import onnx_model, value

from modelserver.errors import InvalidArgumentError
from modelserver.toolkit import onnx_file


def test_origins_are_stripped_in_inner_graphs_too(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Abs", ["x"], ["then"], doc_string="/home/me")], "b", [], [value("then", [1])]
    )
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["else"])], "c", [], [value("else", [1])])
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=other)
    model = onnx_model([value("x", [1]), value("flag", [], TensorProto.BOOL)], [value("y", [1])], [node])
    model.doc_string = "made in /home/me"
    entry = model.graph.node[0].metadata_props.add()
    entry.key, entry.value = "trace", "/home/me/model.py"
    assert onnx_file.count_ops(model) == {"If": 1, "Abs": 1, "Neg": 1}
    onnx_file.strip_origin(model)
    path = onnx_file.write_onnx(model, tmp_path / "1")
    assert b"/home/me" not in path.read_bytes()
    assert onnx_file.read_onnx(path) == model


def test_large_weights_go_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_repository: Path) -> None:
    model = onnx_file.read_onnx(model_repository / "digits_onnx/1/model.onnx")
    monkeypatch.setattr(onnx_file, "MAX_INLINE_BYTES", 1000)
    path = onnx_file.write_onnx(model, tmp_path / "1")
    assert onnx_file.external_files(path) == ("model.onnx.data",)
    again = onnx_file.read_onnx(path)
    original = onnx_file.read_onnx(model_repository / "digits_onnx/1/model.onnx")
    assert [one.raw_data for one in again.graph.initializer] == [one.raw_data for one in original.graph.initializer]


@pytest.mark.parametrize("content", [b"", b"\x08\x07", b"no model at all", b"\xff" * 100])
def test_what_is_no_model_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="is not an ONNX model"):
        onnx_file.read_onnx(path)
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        onnx_file.read_onnx(tmp_path / "absent.onnx")


def test_names_that_are_no_text_are_damage() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'m.onnx' is damaged"), onnx_file.readable_names("m.onnx"):
        b"Ge\xecm".decode()
