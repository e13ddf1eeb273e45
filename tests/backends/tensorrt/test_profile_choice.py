from __future__ import annotations

import pytest
from modelserver_backends.tensorrt.profile_choice import choose_profile, listed_profiles, smallest_batch
from support.engines import engine, tensor

from modelserver.backend import ConfigError, InvalidArgumentError

ENGINE = engine(
    tensor("in", -1, -1),
    tensor("out", -1, -1),
    profiles=[
        {"in": ((1, 4), (2, 16), (8, 32))},
        {"in": ((1, 16), (4, 64), (8, 128))},
        {"in": ((4, 16), (32, 64), (64, 128))},
    ],
)
SHAPED = engine(
    tensor("in", -1),
    tensor("in_shape", 2, kind="INT32", is_shape=True),
    tensor("out", -1, -1),
    profiles=[
        {"in": ((1,), (4,), (8,)), "in_shape": ((1, 1), (4, 8), (8, 32))},
        {"in": ((1,), (4,), (8,)), "in_shape": ((1, 16), (4, 64), (8, 256))},
    ],
)


@pytest.mark.parametrize(
    ("shape", "profile"), [((1, 4), 0), ((2, 20), 0), ((4, 32), 0), ((5, 50), 1), ((8, 33), 1), ((20, 64), 2)]
)
def test_the_nearest_profile_that_fits_is_taken(shape: tuple[int, ...], profile: int) -> None:
    assert choose_profile(ENGINE, (0, 1, 2), {"in": shape}, {}) == profile


def test_values_of_shape_tensors_count_as_dimensions_do() -> None:
    assert choose_profile(SHAPED, (0, 1), {"in": (2,)}, {"in_shape": (2, 10)}) == 0
    assert choose_profile(SHAPED, (0, 1), {"in": (2,)}, {"in_shape": (2, 100)}) == 1
    with pytest.raises(
        InvalidArgumentError, match="The shape value at index 1 is expected to be in range from 1 to 32, Got: 100"
    ):
        choose_profile(SHAPED, (0,), {"in": (2,)}, {"in_shape": (2, 100)})


def test_what_fits_nowhere_is_said_in_tritons_words() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        choose_profile(ENGINE, (0, 1), {"in": (2, 500)}, {})
    assert raised.value.message.startswith(
        "failed to find any Optimization Profile among [ 0[0] 1[1]] to support the requested dimensions (or shape "
        "values): profile 0: "
    )
    with pytest.raises(
        InvalidArgumentError, match="expected the shape of dimension 1 to be between 4 and 32 but received 33"
    ):
        choose_profile(ENGINE, (0,), {"in": (1, 33)}, {})
    with pytest.raises(InvalidArgumentError, match="input 'in' is missing"):
        choose_profile(ENGINE, (0,), {}, {})
    with pytest.raises(InvalidArgumentError, match="expected 2 dimensions but received 1"):
        choose_profile(ENGINE, (0,), {"in": (3,)}, {})


def test_the_profiles_of_a_group() -> None:
    assert listed_profiles((), 3, "'m_0'") == (0,)
    assert listed_profiles(("2", " 0", "2"), 3, "'m_0'") == (2, 0)
    with pytest.raises(ConfigError, match="unable to parse 'x'"):
        listed_profiles(("x",), 3, "'m_0'")
    with pytest.raises(ConfigError, match=r"profile 9\[9\] for 'm_0'. Expected optimization profile index range 0-2"):
        listed_profiles(("9",), 3, "'m_0'")
    with pytest.raises(ConfigError, match="unable to parse '-1'"):
        listed_profiles(("-1",), 3, "'m_0'")


def test_small_batches_are_filled_up_to_the_smallest_that_a_profile_takes() -> None:
    assert smallest_batch(ENGINE, (0, 2)) == 1
    assert smallest_batch(ENGINE, (2,)) == 4
