from pathlib import Path

import pytest

from modelserver.errors import InvalidArgumentError
from modelserver.repository import load_request
from modelserver.repository.load_request import ReplacementDirectory


@pytest.fixture(autouse=True)
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load_request.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_holds_the_files_until_the_last_release(temporary_root: Path) -> None:
    directory = ReplacementDirectory("m", {"1/model": b"x", "labels": b"y"})
    assert (directory.path / "1" / "model").read_bytes() == b"x"
    directory.acquire()
    directory.release()
    assert directory.path.exists()
    directory.release()
    assert list(temporary_root.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["../x", "1/../../x", "/etc/passwd", "1//x", "", ".", "1/./x", "1\\x", "1/x\0", "1/", "1/.."]
)
def test_paths_that_are_not_plainly_inside_are_refused(temporary_root: Path, path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="invalid file override path"):
        ReplacementDirectory("m", {"1/good": b"", path: b"bad"})
    assert list(temporary_root.iterdir()) == []


def test_a_file_where_a_directory_is_needed_leaves_nothing(temporary_root: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="names a directory"):
        ReplacementDirectory("m", {"1": b"", "1/model": b""})
    assert list(temporary_root.iterdir()) == []
