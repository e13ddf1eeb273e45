"""The backend of docs/backends.md, installed from outside of the tree in both ways."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contexts import context_of, loaded

from modelserver.backend import ConfigError, InvalidArgumentError, ModelConfig, Placement
from modelserver.backend.discovery import find_backend, list_backends

DOCUMENT = Path(__file__).parents[2] / "docs" / "backends.md"


@pytest.fixture(scope="module")
def snippets() -> list[str]:
    """The Python on the page: the backend, and the way to test it."""
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.fixture
def plugins(tmp_path: Path, snippets: list[str]) -> Iterator[Path]:
    """A backend directory with the page's backend in it."""
    path = tmp_path / "plugins" / "linear" / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(snippets[0])
    yield tmp_path / "plugins"
    for name in [name for name in sys.modules if name.startswith(("modelserver_external_", "my_package"))]:
        del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A linear model: y = [a + 2b + 10]."""
    directory = tmp_path / "models" / "prices"
    (directory / "1").mkdir(parents=True)
    np.savez(directory / "1" / "model.npz", weights=np.array([[1.0], [2.0]]), bias=np.array([10.0]))
    return directory


def installed(site: Path, source: str) -> None:
    """What `pip install` of a distribution with the page's entry point leaves behind."""
    (site / "my_package").mkdir(parents=True)
    (site / "my_package" / "__init__.py").touch()
    (site / "my_package" / "linear.py").write_text(source)
    (entry_points,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    target = re.search(r'linear = "(.*)"', entry_points)
    assert target is not None
    info = site / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[modelserver.backends]\nlinear = {target.group(1)}\n")


def answers(backend_class: Any, model: Path) -> list[list[float]]:
    instance: Any = loaded(backend_class, context_of(model)).create_instance(Placement("prices_0"))
    return instance.run({"x": np.array([[1, 1], [0, 2]], np.float32)})["y"].tolist()


def test_from_a_backend_directory(plugins: Path, model: Path) -> None:
    assert answers(find_backend("linear", backend_directories=[plugins]), model) == [[13], [14]]


def test_from_an_entry_point(
    tmp_path: Path, snippets: list[str], plugins: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path / "site", snippets[0])
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert answers(find_backend("linear"), model) == [[13], [14]]
    assert "entry point of my-package" in [listing.source for listing in list_backends()]


def test_its_config_is_completed(plugins: Path, model: Path) -> None:
    config = find_backend("linear", backend_directories=[plugins]).complete_config(context_of(model))
    assert (config.input[0].name, config.input[0].dims, config.max_batch_size) == ("x", (2,), 4)


def test_its_conflicts_are_reported(plugins: Path, model: Path) -> None:
    (model / "config.pbtxt").write_text('max_batch_size: 8 input { name: "x" dims: [ 3 ] }')
    with pytest.raises(ConfigError, match=r"input\[0\].dims: expected \[2\] for 'x'"):
        find_backend("linear", backend_directories=[plugins]).complete_config(context_of(model))


def test_its_parameters_arrive(plugins: Path, model: Path) -> None:
    context = context_of(model, config=ModelConfig(parameters={"bias_scale": "0"}))
    backend = loaded(find_backend("linear", backend_directories=[plugins]), context)
    instance: Any = backend.create_instance(Placement("prices_0"))
    assert instance.run({"x": np.ones((1, 2), np.float32)})["y"].item() == 3


def test_its_errors_are_its_own(plugins: Path, model: Path) -> None:
    np.savez(model / "1" / "model.npz", weights=np.ones((1, 1)))
    with pytest.raises(InvalidArgumentError, match="expected arrays 'weights' and 'bias'"):
        find_backend("linear", backend_directories=[plugins]).complete_config(context_of(model))


def test_the_pages_test_passes(plugins: Path, model: Path, snippets: list[str]) -> None:
    names: dict[str, Any] = {}
    exec(snippets[-1], names)
    assert names["answer"](plugins, model, np.ones((1, 2), np.float32)).item() == 13
