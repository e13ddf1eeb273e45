from __future__ import annotations

from pathlib import Path

import pytest
from modelserver_backends.tensorrt.source import build_source, find_source
from support.engines import context_with, plan_bytes
from support.onnx_models import identity_model

from modelserver.backend import ConfigError, NotFoundError


def with_files(directory: Path, *names: str) -> Path:
    (directory / "1").mkdir(parents=True)
    for name in names:
        (directory / "1" / name).write_bytes(plan_bytes())
    return directory


@pytest.mark.parametrize(
    ("files", "text", "capability", "plan", "onnx"),
    [
        (["model.plan"], "", "", "model.plan", None),
        (["model.onnx"], "", "", None, "model.onnx"),
        (["model.plan", "model.onnx"], "", "", "model.plan", "model.onnx"),
        # What `normalise` fills in is nobody's wish.
        (["model.onnx"], 'default_model_filename: "model.plan"', "", None, "model.onnx"),
        (["a.plan", "model.plan"], 'default_model_filename: "a.plan"', "", "a.plan", None),
        (["a.onnx", "model.plan"], 'default_model_filename: "a.onnx"', "", None, "a.onnx"),
        (["h.plan", "model.plan"], 'cc_model_filenames { key: "9.0" value: "h.plan" }', "9.0", "h.plan", None),
        (["h.plan", "model.plan"], 'cc_model_filenames { key: "9.0" value: "h.plan" }', "8.9", "model.plan", None),
    ],
)
def test_the_file_is_found(
    tmp_path: Path, files: list[str], text: str, capability: str, plan: str | None, onnx: str | None
) -> None:
    source = find_source(context_with(text, with_files(tmp_path / "m", *files)), capability)
    assert (source.plan.name if source.plan else None) == plan
    assert (source.onnx_path.name if source.onnx_path else None) == onnx


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = with_files(tmp_path / "m")
    with pytest.raises(NotFoundError, match=r"unable to find '.*model\.plan' for model 'm', nor model\.onnx"):
        find_source(context_with("", directory))
    with pytest.raises(NotFoundError, match=r"unable to find '.*a\.plan' for model 'm'"):
        find_source(context_with('default_model_filename: "a.plan"', directory))


def parameters(**values: str) -> str:
    return " ".join(
        f'parameters {{ key: "{key.replace("_", ".", 1) if key.startswith("profile") else key}" '
        f'value {{ string_value: "{value}" }} }}'
        for key, value in values.items()
    )


def source_of(tmp_path: Path, text: str, **fields: object) -> object:
    directory = identity_model(tmp_path / "m", ["n", "seq"])
    return build_source(context_with(text, directory, **fields), directory / "1" / "model.onnx")


def test_profiles_come_from_parameters(tmp_path: Path) -> None:
    text = parameters(profile_0="x:1x1/4x64/8x128", profile_1="x:1x128/1x256/2x512")
    source = source_of(tmp_path, text)
    assert [profile["x"].max for profile in source.profiles] == [(8, 128), (2, 512)]
    assert source.largest_batch == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batch_size: 8", r"'x' dimension 1 \(seq\)"),
        (parameters(profile_1="x:1x1"), r"expected profile\.0, profile\.1, \.\.\. without a gap, got profile\.1"),
        (parameters(profile_0="y:1x1"), "no input 'y' in the model"),
        (parameters(profile_0="x:1x"), "model 'm': model 'm': parameter profile.0: expected input:MIN/OPT/MAX"),
        (parameters(profile_0="x:1x1", opt_level="9"), "opt_level: expected 0 to 5, got 9"),
        (parameters(profile_0="x:1x1", precision="int3"), "precision: expected one of keep, fp16, bf16, got 'int3'"),
        (parameters(profile_0="x:1x1", workspace_bytes="lots"), "workspace_bytes: expected a size"),
        (parameters(profile_0="x:1x1", tf32="perhaps"), "tf32: expected true or false"),
    ],
)
def test_wrong_parameters_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        source_of(tmp_path, text)


def test_without_a_profile_it_is_the_batch(tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    path = directory / "1" / "model.onnx"
    for text, options, largest in (
        ("max_batch_size: 16", {}, 16),
        ("", {}, 4),
        ("", {"default-max-batch-size": "32"}, 32),
    ):
        source = build_source(context_with(text, directory, options=options), path)
        assert (source.profiles[0]["x"].max, source.largest_batch) == ((largest, 3), largest)
    # Dims that list the first dimension say that it is no batch, and nothing says how large it may be.
    with pytest.raises(ConfigError, match=r"'x' dimension 0 \(n\)"):
        build_source(context_with('input [ { name: "x" dims: [ -1, 3 ] } ]', directory), path)
