"""Text in `.pt2` files that torch would evaluate: what torch.export writes passes, and nothing else does."""

from __future__ import annotations

import ast
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from modelserver_backends.pytorch.program_text import check_program_text
from support.contexts import context_of
from support.torch_models import Copy, path_in, rewritten, write_export
from torch.export import Dim

from modelserver.backend import UnsupportedError
from modelserver.backend.discovery import find_backend


class Shapely(torch.nn.Module):
    """Sizes, branches and guards of many kinds."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))
        half = chosen[:, : x.shape[0] // 2 + 1].reshape(x.shape[0], -1)
        return half + y.shape[0] * 2.5 + max(x.shape[0], 3) % 2 + (x.shape[0] - 1) ** 2


def node(target: str) -> dict[str, object]:
    return {"graph": {"nodes": [{"target": target, "inputs": []}]}}


def test_what_torch_writes_passes() -> None:
    batch = Dim("batch", max=8)
    shapes = ({0: batch}, {0: batch})
    program = torch.export.export(Shapely(), (torch.ones(4, 9), torch.ones(4, 3)), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if "/models/" in name]
        content = json.loads(archive.read(name))
    assert content["guards_code"], "the program has nothing to look at"
    check_program_text(content, where="it")


def test_a_tree_that_another_thread_disturbs_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models load beside each other, and Python 3.11 may take the depth of one tree for that of another."""
    failures = iter([True, True])
    parse = ast.parse

    def disturbed(text: str, *, mode: str) -> ast.AST:
        if next(failures, False):
            raise SystemError("AST constructor recursion depth mismatch (before=69, after=51)")
        return parse(text, mode=mode)

    monkeypatch.setattr(ast, "parse", disturbed)
    check_program_text({"expr_str": "Symbol('s0')"}, where="it")


@pytest.mark.parametrize(
    "program",
    [
        {"expr_str": "__import__('os').system('true')"},
        {"expr_str": "Symbol('s0').func.__globals__"},
        {"expr_str": "exec('x')"},
        {"expr_str": "lambda: 0"},
        {"expr_str": "[x for x in Integer(2)]"},
        {"expr_str": "Integer(" + "(" * 9000 + "1" + ")" * 9000 + ")"},
        {"expr_str": "1;import os"},
        {"deep": [{"guards_code": ["L['x'].size()[0] == 1", "(lambda: open('/x'))()"]}]},
        {"guards_code": "torch.load(L)"},
        {"guards_code": ["L['x'].__class__"]},
        {"guards_code": ["math.__loader__"]},
        node("torch.load"),
        node("torch.ops.load_library"),
        node("torch.ops.aten.__class__"),
        node("_operator.methodcaller"),
        node("_operator.attrgetter"),
        node("math.__loader__.load_module"),
        node("#extension:op"),
        node("os.system"),
    ],
)
def test_anything_else_is_refused(program: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="that could run any code"):
        check_program_text(program, where="it")


@pytest.mark.parametrize(
    "program",
    [
        {"expr_str": "s0 + 1"},
        {"expr_str": "OpaqueUnaryFn_sqrt(Symbol('s1', integer=True))"},
        {"guards_code": ["math.sqrt(L['x'].size()[0]) <= 3", "L['a']['b'].stride()[1] == 1"]},
        node("torch.sym_float"),
        node("_operator.floordiv"),
        node("_operator.and_"),
        node("torch.ops.higher_order.cond"),
        node("torch.ops.aten._assert_tensor_metadata.default"),
    ],
)
def test_plain_sizes_guards_and_operators_pass(program: dict[str, object]) -> None:
    check_program_text(program, where="it")


def test_a_trap_is_not_sprung_by_loading(tmp_path: Path) -> None:
    directory = write_export(tmp_path, Copy(), torch.ones(2))
    path = path_in(directory, "model.pt2")
    sprung = tmp_path / "sprung"
    program = json.loads(zipfile.ZipFile(path).read("model/models/model.json"))
    program["guards_code"] = [f"__import__('pathlib').Path({str(sprung)!r}).touch() is None"]
    rewritten(path, {"models/model.json": json.dumps(program).encode()})
    with pytest.raises(UnsupportedError, match=r"holds a guard that could run any code: .*allow-pickle=true"):
        find_backend("pytorch").complete_config(context_of(directory))
    assert not sprung.exists()
