"""Ensembles in repositories that are read without being served."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cloud import CountingStore, memory_bucket
from support.model_files import write_identity, write_model

from modelserver.cli.stored_models import StoredModel, read_model, read_repositories
from modelserver.repository import roots
from modelserver.repository.options import DefinitionOptions

CHAIN = """
platform: "ensemble"
max_batch_size: 8
input {{ name: "INPUT0" data_type: {datatype} dims: -1 }}
output {{ name: "OUTPUT0" data_type: {datatype} dims: -1 }}
ensemble_scheduling {{ step {{ model_name: "{model}" model_version: {version}
  input_map {{ key: "INPUT0" value: "INPUT0" }} output_map {{ key: "OUTPUT0" value: "OUTPUT0" }} }} }}
"""


def write_chain(root: Path, name: str, model: str, *, version: int = -1, datatype: str = "TYPE_FP32") -> None:
    write_model(root, name, CHAIN.format(model=model, version=version, datatype=datatype))


def read_all(root: Path) -> dict[str, StoredModel]:
    found, _ = read_repositories([str(root)], DefinitionOptions())
    return {stored.name: stored for stored in found}


def messages(stored: StoredModel) -> list[str]:
    return [f"{problem.line}:{problem.column}: {problem.message}" for problem in stored.problems]


def test_an_ensemble_is_checked_with_its_models(tmp_path: Path) -> None:
    write_identity(tmp_path, "model")
    write_chain(tmp_path, "good", "model")
    write_chain(tmp_path, "above", "good")
    write_chain(tmp_path, "typo", "modell")
    write_chain(tmp_path, "older", "model", version=3)
    write_chain(tmp_path, "whole", "model", datatype="TYPE_INT32")
    found = read_all(tmp_path)
    assert found["good"].is_valid
    assert found["above"].is_valid
    assert messages(found["typo"]) == ["6:30: there is no model 'modell'; did you mean 'model'?"]
    assert messages(found["older"]) == ["6:30: model 'model' does not serve version 3, only 1"]
    assert [line.partition(":")[0] for line in messages(found["whole"])] == ["5", "7"]
    assert read_model([str(tmp_path)], "good", DefinitionOptions()).is_valid


def test_what_is_wrong_below_is_said_above(tmp_path: Path) -> None:
    write_model(tmp_path, "model", "max_batch_size: -3")
    write_chain(tmp_path, "chain", "model")
    assert messages(read_all(tmp_path)["chain"]) == ["6:30: model 'model' has problems of its own"]


def test_ensembles_that_contain_each_other_are_told(tmp_path: Path) -> None:
    write_chain(tmp_path, "one", "two")
    write_chain(tmp_path, "two", "three")
    write_chain(tmp_path, "three", "one")
    found = read_all(tmp_path)
    assert not any(stored.is_valid for stored in found.values())
    assert any("ensembles contain each other: " in line for item in found.values() for line in messages(item))


def test_models_of_an_object_store_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with memory_bucket("inspected") as bucket:
        monkeypatch.setattr(roots, "CloudStore", lambda *_: CountingStore(bucket))
        bucket.write_model("good", versions=(1, 3))
        bucket.write_model("bad", config="max_batch_size: -3")
        address = bucket.uri.text
        found, _ = read_repositories([address], DefinitionOptions())
        assert [(each.name, each.is_valid, each.directory) for each in found] == [
            ("bad", False, Path(address) / "bad"),
            ("good", True, Path(address) / "good"),
        ]
        definition = read_model([address], "good", DefinitionOptions()).definition
    assert definition is not None
    assert list(definition.versions) == [3]
