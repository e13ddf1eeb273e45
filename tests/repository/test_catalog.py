import os
from pathlib import Path

import pytest
from support.repositories import write_model

from modelserver.app.server import repository_options
from modelserver.options.server_options import ServerOptions
from modelserver.repository import catalog
from modelserver.repository.catalog import Catalog
from modelserver.repository.fingerprint import ModelFingerprint
from modelserver.repository.layout import INCOMPLETE_MARKER, IgnoredPath, ModelLayout, fingerprint_model
from modelserver.repository.roots import RepositoryRoot, RepositoryScan


def catalog_of(*roots: Path) -> Catalog:
    return Catalog([RepositoryRoot(root) for root in roots], "")


def test_a_survey_has_the_state_of_every_model(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "a")
    for root in ("one", "two"):
        write_model(tmp_path / root, "twice")
    write_model(tmp_path / "one", "held")
    (tmp_path / "one" / "held" / INCOMPLETE_MARKER).touch()
    survey = catalog_of(tmp_path / "one", tmp_path / "two").survey()
    assert survey.fingerprints["a"] is not None
    assert survey.fingerprints["twice"] is None
    assert survey.fingerprints["held"] is None


def test_a_model_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad")

    def read_unless_bad(layout: ModelLayout) -> ModelFingerprint:
        if layout.name == "bad":
            raise PermissionError("bad/1")
        return fingerprint_model(layout)

    monkeypatch.setattr(catalog, "fingerprint_model", read_unless_bad)
    survey = catalog_of(tmp_path).survey()
    assert survey.fingerprints["good"] is not None
    assert survey.fingerprints["bad"] is None


def test_refresh_finds_new_and_removed_models(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    known = catalog_of(tmp_path)
    known.refresh()
    assert known.scan.names == ("a",)
    write_model(tmp_path, "b")
    os.utime(tmp_path, ns=(1, 1))
    known.refresh()
    assert known.scan.names == ("a", "b")


def test_refresh_looks_again_at_directories_that_were_no_models_yet(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    known = catalog_of(tmp_path)
    known.refresh()
    assert known.scan.names == ()
    write_model(tmp_path, "b")
    known.refresh()
    assert known.scan.names == ("b",)


def test_refresh_keeps_what_it_knew_when_a_root_is_gone(tmp_path: Path) -> None:
    write_model(tmp_path / "root", "a")
    known = catalog_of(tmp_path / "root")
    known.refresh()
    (tmp_path / "root").rename(tmp_path / "away")
    known.refresh()
    assert known.scan.names == ("a",)


def test_a_model_that_becomes_unreadable_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "a")
    unreadable = RepositoryScan(
        ignored=(IgnoredPath(tmp_path / "a", "it cannot be read", is_unreadable=True, key="a"),)
    )
    monkeypatch.setattr(catalog, "scan_roots", lambda *_args, **_options: unreadable)
    assert catalog_of(tmp_path).survey().fingerprints == {"a": None}


def test_what_is_left_out_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "bad name")
    known = catalog_of(tmp_path)
    known.survey()
    known.survey()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "bad name" in record.getMessage()
    assert "not a model name" in record.getMessage()


def test_a_repository_that_is_given_twice_counts_once() -> None:
    options = ServerOptions(model_repository=("models", "models/", "other"))
    assert repository_options(options).roots == (Path("models"), Path("other"))
