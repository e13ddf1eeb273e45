"""Missing libraries are named, with what to type."""

import sys

import pytest

from modelserver.errors import UnavailableError
from modelserver.toolkit import require


def test_a_library_that_is_there_is_imported() -> None:
    assert require("json", extra="convert", purpose="reading").loads("1") == 1


def test_a_missing_library_is_named_with_the_pip_line() -> None:
    with pytest.raises(UnavailableError, match=r"quantizing needs .* 'no_such_thing'.*pip install 'modelserver-py\[q"):
        require("no_such_thing.inner", extra="quantize", purpose="quantizing")


def test_what_a_library_lacks_is_named_too(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_there.py").write_text("import its_own_need")
    (tmp_path / "broken_one.py").write_text("raise ImportError('cannot find libcuda.so.1')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnavailableError, match="'its_own_need', which is not installed"):
        require("half_there", extra="convert", purpose="exporting")
    with pytest.raises(UnavailableError, match="'broken_one', which cannot be imported: cannot find libcuda"):
        require("broken_one", extra="convert", purpose="exporting")
    sys.modules.pop("half_there", None)
