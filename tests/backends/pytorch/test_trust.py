"""Files that a client brought with a load request: neither they nor their config can vouch for themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from modelserver_backends.pytorch.archive import FileKind
from modelserver_backends.pytorch.trust import check_trust
from support.contexts import context_of
from support.torch_models import Copy, write_export

from modelserver.backend import BackendContext, ModelConfig, UnsupportedError

PATH = Path("/m/1/model.pt")


def context(platform: str = "", *, is_uploaded: bool = True, **options: str) -> BackendContext:
    given = context_of(Path("/m"), config=ModelConfig(platform=platform), options=options)
    return replace(given, is_uploaded=is_uploaded)


@pytest.mark.parametrize("kind", [FileKind.PACKAGE, FileKind.TORCHSCRIPT])
def test_uploaded_programs_need_the_operators_word(kind: FileKind) -> None:
    with pytest.raises(UnsupportedError, match=r"came with the request to load it.*pytorch,allow-native-code=true"):
        check_trust(context("torch_aoti"), kind, PATH)
    check_trust(context("torch_aoti", **{"allow-native-code": "true"}), kind, PATH)
    check_trust(context("torch_aoti", is_uploaded=False), kind, PATH)


def test_pickles_need_it_wherever_they_come_from() -> None:
    for is_uploaded in (True, False):
        with pytest.raises(UnsupportedError, match="allow-pickle=true"):
            check_trust(context(is_uploaded=is_uploaded), FileKind.PICKLE, PATH)


def test_an_exported_program_without_code_may_come_from_anywhere(tmp_path: Path) -> None:
    directory = write_export(tmp_path, Copy(), torch.ones(2, 3))
    (path,) = (directory / "1").iterdir()
    check_trust(replace(context_of(directory), is_uploaded=True), FileKind.EXPORTED, path)
