"""Which optimisation profile serves a batch: Triton's rule, over plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelserver.backend import ConfigError, InvalidArgumentError

from .engine_info import EngineInfo, Shape


def listed_profiles(texts: Sequence[str], num_profiles: int, where: str) -> tuple[int, ...]:
    """The profiles of an instance group, by `profile` in its config; the first one where it names none.

    Raises ConfigError for anything but the index of a profile; repetitions count once.
    """
    found: list[int] = []
    for text in texts or ("0",):
        stripped = text.strip()
        if not stripped.isascii() or not stripped.isdecimal():
            raise ConfigError(f"unable to parse '{text}': {where}: profile is expected to be the index of a profile")
        index = int(stripped)
        if index >= num_profiles:
            raise ConfigError(
                f"Can not set the specified optimization profile {text}[{index}] for {where}. Expected optimization "
                f"profile index range 0-{num_profiles - 1}"
            )
        if index not in found:
            found.append(index)
    return tuple(found)


def choose_profile(
    info: EngineInfo, profiles: Sequence[int], shapes: Mapping[str, Shape], values: Mapping[str, Shape]
) -> int:
    """The profile, of those given, that holds these shapes and is nearest to its optimum.

    `shapes` are those of all inputs, `values` what shape tensors hold. Raises InvalidArgumentError when none fits.
    """
    wanted = {**shapes, **values}
    fitting = [index for index in profiles if _misfit(info, index, wanted) is None]
    if fitting:
        return min(fitting, key=lambda index: _distance(info, index, wanted))
    if len(profiles) == 1:
        raise InvalidArgumentError(str(_misfit(info, profiles[0], wanted)))
    listed = " ".join(f"{index}[{index}]" for index in profiles)
    raise InvalidArgumentError(
        f"failed to find any Optimization Profile among [ {listed}] to support the requested dimensions (or shape "
        f"values): {'; '.join(f'profile {index}: {_misfit(info, index, wanted)}' for index in profiles)}"
    )


def _misfit(info: EngineInfo, profile: int, wanted: Mapping[str, Shape]) -> str | None:
    """Why a profile does not hold what is wanted; None if it does."""
    for tensor in info.inputs:
        given = wanted.get(tensor.name)
        bounds = info.profiles[profile][tensor.name]
        if given is None:
            return f"input '{tensor.name}' is missing"
        what = "value" if tensor.is_shape_tensor else "dimension"
        if len(given) != len(bounds.min):
            return f"input '{tensor.name}': model expected {len(bounds.min)} {what}s but received {len(given)}"
        for place, size in enumerate(given):
            low, high = bounds.min[place], bounds.max[place]
            if not low <= size <= high:
                if tensor.is_shape_tensor:
                    return (
                        f"input '{tensor.name}': The shape value at index {place} is expected to be in range "
                        f"from {low} to {high}, Got: {size}"
                    )
                return (
                    f"request specifies invalid shape for input '{tensor.name}'. Error details: model expected the "
                    f"shape of dimension {place} to be between {low} and {high} but received {size}"
                )
    return None


def _distance(info: EngineInfo, profile: int, wanted: Mapping[str, Shape]) -> int:
    bounds = info.profiles[profile]
    return sum(bounds[tensor.name].distance(wanted[tensor.name]) for tensor in info.inputs)


def smallest_batch(info: EngineInfo, profiles: Sequence[int]) -> int:
    """The fewest rows that one of the profiles takes: batches of fewer are filled up."""
    return min(
        (max((info.profiles[index][tensor.name].min[:1] or (0,))[0] for tensor in info.inputs) for index in profiles),
        default=0,
    )
