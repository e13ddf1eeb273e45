"""The family of docs/add-a-model-family.md, installed from outside of the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from modelserver_backends.llm.models.decoder import Decoder
from modelserver_backends.llm.models.families import find_family
from support.generations import generate, loaded_engine, random_prompts
from support.packages import DOCS, installed_from
from support.tiny_checkpoints import reference_logprobs, reference_tokens

from modelserver.backend import InvalidArgumentError, UnavailableError

PAGE = "add-a-model-family.md"
PROMPTS = random_prompts(5)


@pytest.fixture
def package(tmp_path: Path) -> Iterator[str]:
    with installed_from(PAGE, tmp_path / "site") as name:
        yield name


@pytest.mark.usefixtures("package")
def test_its_logits_are_those_of_transformers(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("granite")
    with loaded_engine(directory, block_size=4) as engine:
        assert isinstance(engine.runner._network, Decoder)
        results = generate(engine, PROMPTS, 8)
    for prompt, (tokens, logprobs) in zip(PROMPTS, results, strict=True):
        assert tokens == reference_tokens(directory, prompt, 8)
        expected = reference_logprobs(directory, prompt + tokens)[len(prompt) - 1 : -1]
        assert logprobs == pytest.approx(
            [float(row[token]) for row, token in zip(expected, tokens, strict=True)], abs=1e-3
        )


@pytest.mark.usefixtures("package")
def test_it_has_what_our_own_network_has(checkpoint: Callable[[str], Path]) -> None:
    with loaded_engine(checkpoint("granite"), quantization="int8") as engine:
        assert len(generate(engine, PROMPTS[:1], 4)[0][0]) == 4


def test_without_it_there_is_no_such_family() -> None:
    assert find_family("granite") is None


@pytest.mark.usefixtures("package")
def test_an_entry_that_its_config_lacks_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    text = (checkpoint("granite") / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("residual_multiplier", "residual"))
    with (
        pytest.raises(InvalidArgumentError, match=r"config\.json of a granite has no residual_multiplier"),
        loaded_engine(tmp_path),
    ):
        pass


def test_one_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    with installed_from(PAGE, tmp_path / "site") as name:
        (tmp_path / "site" / f"{name}.py").write_text("raise RuntimeError('no weights today')")
        with pytest.raises(UnavailableError, match=r"my_granite:Granite .* RuntimeError: no weights"):
            find_family("granite")


def test_the_page_is_short_of_a_hundred_lines() -> None:
    text = (DOCS / PAGE).read_text()
    assert text.split("```python\n")[1].split("```")[0].count("\n") < 100
