import hashlib
import stat
from pathlib import Path

import pytest

from modelserver.errors import InternalError, InvalidArgumentError
from modelserver.repository.load_request import LoadRequest
from modelserver.repository.override_store import OverrideStore, check_storable

BOTH = LoadRequest('{"a": 1}', {"1/weights": b"heavy", "1/more/labels": b""})


@pytest.fixture
def store(tmp_path: Path) -> OverrideStore:
    return OverrideStore(tmp_path / "kept")


def contents(request: LoadRequest | None) -> tuple[str | None, dict[str, bytes]]:
    assert request is not None
    return request.config_json, {
        path: Path(str(content)).read_bytes() for path, content in (request.files or {}).items()
    }


def blobs(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "kept" / "blobs").iterdir()}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_is_saved_is_read_by_another_store(store: OverrideStore, tmp_path: Path) -> None:
    store.save("m", BOTH)
    store.save("n", LoadRequest("{}"))
    other = OverrideStore(tmp_path / "kept")
    assert other.names() == ("m", "n")
    assert contents(other.read("m")) == ('{"a": 1}', {"1/weights": b"heavy", "1/more/labels": b""})
    assert contents(other.read("n")) == ("{}", {})
    assert (other.read("missing"), other.has("m"), other.has("missing")) == (None, True, False)


def test_saving_again_replaces_and_equal_files_are_kept_once(store: OverrideStore, tmp_path: Path) -> None:
    store.save("m", BOTH)
    store.save("n", LoadRequest("{}", {"3/other": b"heavy"}))
    assert blobs(tmp_path) == {digest(b"heavy"), digest(b"")}
    store.save("m", LoadRequest('{"b": 2}'))
    assert contents(store.read("m")) == ('{"b": 2}', {})
    assert blobs(tmp_path) == {digest(b"heavy")}
    store.remove("n")
    store.remove("n")
    assert (store.names(), blobs(tmp_path)) == (("m",), set())


def test_only_the_owner_may_look(store: OverrideStore, tmp_path: Path) -> None:
    store.save("m", BOTH)
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def test_a_changed_file_is_noticed(store: OverrideStore, tmp_path: Path) -> None:
    store.save("m", BOTH)
    (tmp_path / "kept" / "blobs" / digest(b"heavy")).write_bytes(b"heaty")
    with pytest.raises(
        InvalidArgumentError, match=f"'1/weights': expected SHA-256 {digest(b'heavy')}, got {digest(b'heaty')}"
    ):
        store.read("m")


def test_a_missing_file_is_noticed_and_saving_mends_it(store: OverrideStore, tmp_path: Path) -> None:
    store.save("m", BOTH)
    (tmp_path / "kept" / "blobs" / digest(b"heavy")).unlink()
    with pytest.raises(InvalidArgumentError, match="got no file"):
        store.read("m")
    store.save("m", BOTH)
    assert contents(store.read("m"))[1]["1/weights"] == b"heavy"


@pytest.mark.parametrize("change", [lambda text: text.replace("a", "b", 1), lambda text: text[:20], lambda _: "[]"])
def test_a_changed_manifest_is_noticed(store: OverrideStore, tmp_path: Path, change) -> None:
    store.save("m", BOTH)
    path = tmp_path / "kept" / "models" / "m.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidArgumentError, match=r"the override of model 'm' .* is damaged.*persist=false"):
        store.read("m")
    store.save("n", LoadRequest("{}"))
    assert digest(b"heavy") in blobs(tmp_path), "what a damaged one may use is left"
    store.remove("m")
    assert blobs(tmp_path) == set()


def test_a_manifest_of_another_model_is_not_taken(store: OverrideStore, tmp_path: Path) -> None:
    store.save("m", BOTH)
    (tmp_path / "kept" / "models" / "m.json").rename(tmp_path / "kept" / "models" / "n.json")
    with pytest.raises(InvalidArgumentError, match="damaged"):
        store.read("n")


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="--override-directory"):
        OverrideStore(tmp_path / "file" / "kept")


def test_what_cannot_be_written_is_told(store: OverrideStore, tmp_path: Path) -> None:
    (tmp_path / "kept" / "models" / "m.json").mkdir()
    with pytest.raises(InternalError, match="could not be kept"):
        store.save("m", BOTH)
    with pytest.raises(InternalError, match="cannot be removed"):
        store.remove("m")


def test_names_that_leave_no_room_for_a_suffix() -> None:
    with pytest.raises(InvalidArgumentError, match="201 bytes, expected at most 200"):
        check_storable("m" * 201)
