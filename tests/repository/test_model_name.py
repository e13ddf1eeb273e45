import pytest

from modelserver.errors import InvalidArgumentError
from modelserver.repository.namespaces import check_model_name, name_problem


@pytest.mark.parametrize(
    "name", ["a", "resnet-50", "m.v2", "_m", "7", "großes_modell", "org:model@1", "nop_INT32_-1,-1", "x" * 255]
)
def test_ordinary_names_are_allowed(name: str) -> None:
    check_model_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../m",
        "a/b",
        "a\\b",
        "a..b",
        " ",
        "a b",
        "a\tb",
        "a\n",
        "a\0b",
        "\x7f",
        ".hidden",
        "-flag",
        "x" * 256,
        "\ud800",
    ],
)
def test_names_that_could_leave_the_repository_or_confuse_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^(invalid model name|Model name cannot be empty\.)"):
        check_model_name(name)


def test_a_refused_name_is_shown_escaped_and_cut() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_model_name("a\n" * 1000)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 1000


def test_the_problem_is_named() -> None:
    assert name_problem("") == "it is empty"
    assert "'..'" in (name_problem("..") or "")
