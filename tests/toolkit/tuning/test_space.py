"""What is tried for a model follows from its config, the machine, and what the user says."""

import pytest

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.errors import InvalidArgumentError
from modelserver.toolkit.tuning.space import Candidate, Space, SpaceOptions, make_space

ONNX = 'backend: "onnxruntime" max_batch_size: 64 dynamic_batching { } instance_group { count: 1 kind: KIND_CPU }'


def space(text: str = ONNX, num_cpus: int = 2, **options) -> Space:
    return make_space(parse_pbtxt(text).config, SpaceOptions(**options), num_cpus)


def test_the_model_and_the_machine_decide() -> None:
    made = space()
    assert made.start == Candidate(1, 64, 0, 0)
    assert made.instances == (1, 2)
    assert made.threads == (0, 1, 2)
    assert (64, None) in made.batching
    assert {size for size, _ in made.batching} == {8, 32, 64}
    assert len(set(made)) == made.size == 2 * 3 * 13
    assert space(num_cpus=8).instances == (1, 2, 4, 8)


def test_the_user_decides_and_the_own_setting_stays() -> None:
    made = space(instances=(3,), batch_sizes=(16,), delays_us=(50,), threads=(4,))
    assert (made.instances, made.threads) == ((1, 3), (0, 4))
    assert made.batching == ((16, 50), (64, None), (64, 0))


def test_one_knob_at_a_time() -> None:
    made = space(batch_sizes=(8, 64), delays_us=(0, 100))
    at = made.start
    assert [one.num_threads for one in made.along("threads", at)] == [0, 1, 2]
    assert [one.num_instances for one in made.along("instances", at)] == [1, 2]
    assert [(one.max_batch_size, one.delay_us) for one in made.along("batch", at)] == [(8, 0), (64, None), (64, 0)]
    assert [one.delay_us for one in made.along("delay", at)] == [None, 0, 100]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ('backend: "onnxruntime" instance_group { count: 1 }', "takes no batches"),
        (ONNX.replace("dynamic_batching { }", "sequence_batching { }"), "sequences decide"),
        (ONNX + " instance_group { count: 1 kind: KIND_CPU }", "several instance groups"),
        (ONNX.replace("onnxruntime", "pytorch"), "those of the whole server"),
    ],
)
def test_what_is_not_tuned_is_said(text: str, note: str) -> None:
    assert any(note in one for one in space(text).notes)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (ONNX, {"batch_sizes": (128,)}, "128 is above the model's max_batch_size 64"),
        ('backend: "onnxruntime"', {"batch_sizes": (2,)}, "takes no batches"),
        ('backend: "python"', {"threads": (2,)}, "has no parameter for threads"),
        (ONNX + " instance_group { count: 1 kind: KIND_CPU }", {"instances": (2,)}, "several instance groups"),
    ],
)
def test_what_cannot_be_tried_is_refused(text: str, options: dict, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        space(text, **options)
