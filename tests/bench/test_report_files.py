"""Files of reports are looked at before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelserver.bench.program import run
from modelserver.bench.report_files import check_file, write_file
from modelserver.errors import InvalidArgumentError, ServerError


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    check_file(tmp_path / "new", "-f")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("before")
    check_file(tmp_path / "old", "-f")
    assert (tmp_path / "old").read_text() == "before"
    write_file(tmp_path / "old", "µ", "-f")
    assert (tmp_path / "old").read_bytes() == "µ".encode()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--html: '.*' is a directory"):
        check_file(tmp_path, "--html")
    with pytest.raises(InvalidArgumentError, match=r"^-f: there is no directory '.*no' to write 'o.csv' into"):
        check_file(tmp_path / "no" / "o.csv", "-f")
    with pytest.raises(ServerError, match=r"--json: cannot write '.*': Is a directory"):
        write_file(tmp_path, "", "--json")


@pytest.mark.parametrize("flag", ["-f", "--html", "--json", "--profile-export-file"])
def test_the_server_is_not_even_asked(tmp_path: Path, flag: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{flag}: there is no directory"):
        run(["-m", "m", "-u", "127.0.0.1:1", flag, str(tmp_path / "no" / "file")])
