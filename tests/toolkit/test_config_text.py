"""What is written is what is read again."""

from pathlib import Path

import pytest

from modelserver.config.pbtxt import config_text, parse_pbtxt

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "model_repository").glob("*/config.pbtxt")), ids=lambda p: p.parent.name
)
def test_the_text_of_a_config_is_that_config(path: Path) -> None:
    config = parse_pbtxt(path.read_text()).config
    text = config_text(config, comments=("Made by a test.\nIn two lines.",))
    assert text.startswith("# Made by a test.\n# In two lines.\n")
    assert parse_pbtxt(text).config == config
