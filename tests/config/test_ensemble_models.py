"""What is said about ensembles and the models of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.ensembles import ensemble_config, model_config, parse, step

from modelserver.config.ensemble_graph import ensemble_graph
from modelserver.config.ensemble_models import check_models
from modelserver.config.pbtxt import read_pbtxt
from modelserver.config.schema import EnsembleStep, ModelConfig, ModelResponseCache, ModelSequenceBatching
from modelserver.config.validate import validate
from modelserver.core.datatype import Datatype

A = model_config("a")
PLAIN = (step("a", {"X": "IN"}, {"Y": "mid"}), step("b", {"X": "mid"}, {"Y": "OUT"}))


def problems(config: ModelConfig, *models: ModelConfig) -> Mapping[str, str]:
    """Message by field; the config alone is fine."""
    assert not validate(config)
    by_name = {model.name: model for model in models}
    return {problem.field: problem.message for problem in check_models(config, lambda item: by_name[item.model_name])}


def test_models_that_fit_cause_no_problem() -> None:
    assert not problems(ensemble_config(*PLAIN), A, model_config("b"))


def test_all_problems_come_at_once_with_their_places() -> None:
    text = """name: "e" platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 2, 3 ] }
output { name: "OUT" data_type: TYPE_INT64 dims: [ -1 ] }
ensemble_scheduling {
  step [
    { model_name: "a" input_map { key: "X" value: "IN" } output_map { key: "Z" value: "mid" } },
    { model_name: "b" input_map { key: "XX" value: "mid" } output_map { key: "Y" value: "OUT" } },
    { model_name: "c" input_map { key: "X" value: "mid" } output_map { key: "Y" value: "more" } },
    { model_name: "d" input_map { key: "X" value: "more" } output_map { key: "Y" value: "OUT2" } }
  ]
}
output { name: "OUT2" data_type: TYPE_INT32 dims: [ 5 ] }
"""
    parsed = read_pbtxt(text, "config.pbtxt")
    models = {
        "a": model_config("a", datatype=Datatype.FP32, dims=(2, 4), max_batch_size=8),
        "b": model_config("b", max_batch_size=0),
        "c": model_config("c", max_batch_size=4),
        "d": model_config("d", max_batch_size=4, dims=(7,)),
    }
    found = check_models(
        parsed.config,
        lambda item: models.get(item.model_name) if item.model_name != "c" else "there is no model 'c'",
        locations=parsed.locations,
    )
    assert [f"{problem.line}:{problem.column} {problem.field}" for problem in found] == [
        "3:1 output[0]",
        '6:23 ensemble_scheduling.step[0].input_map["X"]',
        '6:58 ensemble_scheduling.step[0].output_map["Z"]',
        '7:23 ensemble_scheduling.step[1].input_map["XX"]',
        "7:23 ensemble_scheduling.step[1].input_map",
        "8:7 ensemble_scheduling.step[2].model_name",
        "12:1 output[1]",
    ]
    texts = "\n".join(str(problem) for problem in found)
    assert (
        "output 'OUT' of the ensemble has datatype INT64, but tensor 'OUT' is INT32 as output 'Y' of model 'b'" in texts
    )
    assert (
        "input 'X' of model 'a' has shape [-1, 2, 4], but tensor 'IN' is [-1, 2, 3] as input 'IN' of the ensemble"
        in texts
    )
    assert "expected an output of 'a', one of Y; got 'Z'" in texts
    assert "model 'b' needs its inputs ['X'], which no tensor is mapped to" in texts
    assert "there is no model 'c'" in texts
    assert "has shape [-1, 5], but tensor 'OUT2' is [-1, 7] as output 'Y' of model 'd'" in texts


@pytest.mark.parametrize(
    ("own", "models", "is_fine"),
    [
        (8, (8, 8), True),
        (8, (16, 64), True),
        (8, (8, 4), False),
        (8, (8, 0), True),  # a batch of one is as good as its only row
        (0, (0, 0), True),
        (0, (8, 8), True),
    ],
)
def test_batches_must_fit_every_model(own: int, models: tuple[int, int], is_fine: bool) -> None:
    config = ensemble_config(*PLAIN, max_batch_size=own)
    found = problems(config, model_config("a", max_batch_size=models[0]), model_config("b", max_batch_size=models[1]))
    assert (not found) is is_fine


def test_without_batches_of_its_own_an_ensemble_names_the_batch_dimension() -> None:
    config = ensemble_config(*PLAIN, dims=(-1, 4))
    models = (model_config(name, max_batch_size=8, dims=(4,)) for name in "ab")
    assert not problems(config, *models)


def test_a_size_that_is_open_fits_any() -> None:
    config = ensemble_config(*PLAIN, dims=(3,))
    assert not problems(config, model_config("a", dims=(-1,)), model_config("b", dims=(3,)))


def test_two_decoupled_sources_do_not_belong_together() -> None:
    config = ensemble_config(
        step("d", {"X": "IN"}, {"Y": "p"}),
        step("d", {"X": "IN"}, {"Y": "q"}),
        step("two", {"P": "p", "Q": "q"}, {"Y": "OUT"}),
    )
    found = problems(config, model_config("d", is_decoupled=True), model_config("two", inputs=("P", "Q")))
    assert "receives inputs from different decoupled models: 'p' and 'q'" in found["ensemble_scheduling.step[2]"]


def test_outputs_of_two_decoupled_sources_do_not_belong_together() -> None:
    config = ensemble_config(step("d", {"X": "IN"}, {"Y": "P"}), step("d", {"X": "IN"}, {"Y": "Q"}), outputs=("P", "Q"))
    found = problems(config, model_config("d", is_decoupled=True))
    assert "the outputs of the ensemble come from different decoupled models" in found["ensemble_scheduling"]


def test_an_ensemble_with_a_decoupled_model_cannot_be_cached() -> None:
    config = replace(ensemble_config(step("d", {"X": "IN"}, {"Y": "OUT"})), response_cache=ModelResponseCache(True))
    assert not problems(config, model_config("d"))
    found = problems(config, model_config("d", is_decoupled=True))
    assert "an ensemble with a decoupled model (step[0] (model 'd')) cannot be cached" in found["response_cache"]


def test_branches_must_answer_equally_often() -> None:
    config = ensemble_config(
        step("d", {"X": "IN"}, {"Y": "OUT"}),
        step("a", {"X": "IN"}, {"Y": "OUT"}),
        bools=("FLAG",),
        step0="FLAG",
        step1="!FLAG",
    )
    found = problems(config, model_config("d", is_decoupled=True), A)
    assert "answers more or less often than this one" in found["ensemble_scheduling.step[1]"]


def test_what_a_model_needs_must_not_be_optional() -> None:
    config = ensemble_config(step("a", {"X": "IN"}, {"Y": "OUT"}), optional=("IN",))
    [(field, message)] = problems(config, A).items()
    assert field == 'ensemble_scheduling.step[0].input_map["X"]'
    assert message == "input 'IN' of the ensemble is optional, but model 'a' needs its input 'X'"
    assert not problems(config, model_config("a", optional=("X",)))


def test_a_model_that_may_run_without_an_input_is_not_bound_to_its_condition() -> None:
    """b runs also when a is skipped, because its input is optional: then b and c write OUT."""
    config = ensemble_config(
        step("a", {"X": "IN"}, {"Y": "mid"}),
        step("b", {"X": "mid"}, {"Y": "OUT"}),
        step("c", {"X": "IN"}, {"Y": "OUT"}),
        bools=("FLAG",),
        step0="FLAG",
        step2="!FLAG",
    )
    assert not problems(config, A, model_config("b"), model_config("c"))
    found = problems(config, A, model_config("b", optional=("X",)), model_config("c"))
    assert "and both may run" in found['ensemble_scheduling.step[2].output_map["Y"]']


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"step0": "FLAG"}, None),
        ({"step0": "! FLAG"}, None),
        ({"stepa": "FLAG"}, None),
        ({"step0": "FLAGG"}, "tensor 'FLAGG' is neither an input of the ensemble nor written by a step"),
        ({"step0": ""}, "expected the name of a BOOL tensor of the ensemble, or ! and the name, got none"),
        ({"step5": "FLAG", "step0": "FLAG"}, "step[5] does not exist: the ensemble has 2 steps"),
        ({"stepz": "FLAG", "step0": "FLAG"}, "no step has the model 'z'"),
        ({"stepa": "FLAG", "step0": "FLAG"}, "step[0] has a condition already: 'step.a.condition'"),
    ],
)
def test_conditions_must_make_sense(conditions: dict[str, str], message: str | None) -> None:
    config = ensemble_config(*PLAIN, bools=("FLAG",), **conditions)
    messages = [problem.message for problem in validate(config)]
    if message is None:
        assert not messages
    else:
        assert message in messages


def test_a_condition_is_a_tensor_of_bools() -> None:
    config = ensemble_config(*PLAIN, step0="IN")
    found = problems(config, A, model_config("b"))
    assert found == {
        'parameters["step.0.condition"]': "expected a tensor of BOOL, but 'IN' is INT32 as input 'IN' of the ensemble"
    }


def test_a_key_that_is_no_condition_is_told() -> None:
    config = parse(
        """name: "e" platform: "ensemble" input { name: "IN" data_type: TYPE_BOOL dims: 1 }
output { name: "OUT" data_type: TYPE_BOOL dims: 1 }
ensemble_scheduling { step { model_name: "a" input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" } } }
parameters { key: "step.a.conditon" value { string_value: "IN" } }"""
    )
    [problem] = validate(config)
    assert (problem.field, problem.message) == (
        'parameters["step.a.conditon"]',
        "expected as key step.<index or model>, and one of .condition, .retries, .timeout_microseconds",
    )


def test_writers_that_may_both_run_are_told() -> None:
    steps: list[EnsembleStep] = [step("a", {"X": "IN"}, {"Y": "OUT"}), step("b", {"X": "IN"}, {"Y": "OUT"})]
    config = ensemble_config(*steps, bools=("F", "G"), step0="F", step1="!G")
    [problem] = validate(config)
    assert problem.message == "tensor 'OUT' is written twice, first by step[0]"
    assert problem.hint == "give the steps conditions that exclude each other"
    assert not validate(ensemble_config(*steps, bools=("F",), step0="F", step1="!F"))


def test_a_condition_can_close_a_cycle() -> None:
    config = ensemble_config(*PLAIN, step0="OUT")
    assert any("steps wait for each other" in problem.message for problem in validate(config))


def test_the_graph_knows_the_order() -> None:
    graph = ensemble_graph(ensemble_config(*reversed(PLAIN)))
    assert graph.order() == (1, 0)
    assert graph.name_of(0) == "step[0] (model 'b')"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"a.retries": "3", "1.timeout_microseconds": "500"}, None),
        ({"a.retries": "11"}, "expected a whole number from 0 to 10, got '11'"),
        ({"a.retries": "-1"}, "expected a whole number from 0 to 10, got '-1'"),
        ({"a.retries": "²"}, "expected a whole number from 0 to 10, got '²'"),
        ({"a.timeout_microseconds": "0"}, "expected microseconds, a whole number from 1 on, got '0'"),
        ({"a.timeout_microseconds": "1e3"}, "expected microseconds, a whole number from 1 on, got '1e3'"),
        (
            {"a.timeout_microseconds": "9" * 5000},
            f"expected microseconds, a whole number from 1 on, got '{'9' * 5000}'",
        ),
        ({"a.retries": "1", "0.retries": "1"}, "step[0] has retries already: 'step.a.retries'"),
        ({"c.retries": "1"}, "no step has the model 'c'"),
        (
            {"a.patience": "1"},
            "expected as key step.<index or model>, and one of .condition, .retries, .timeout_microseconds",
        ),
    ],
)
def test_limits_must_make_sense(limits: dict[str, str], message: str | None) -> None:
    assert [problem.message for problem in validate(ensemble_config(*PLAIN, limits=limits))] == (
        [message] if message else []
    )


def test_all_problems_of_limits_come_at_once() -> None:
    limits = {"a.retries": "many", "a.timeout_microseconds": "", "9.retries": "1"}
    assert [problem.field for problem in validate(ensemble_config(*PLAIN, limits=limits))] == [
        'parameters["step.9.retries"]',
        'parameters["step.a.timeout_microseconds"]',
        'parameters["step.a.retries"]',
    ]


def test_what_must_not_be_asked_twice_is_not_retried() -> None:
    config = ensemble_config(*PLAIN, limits={"a.retries": "1", "b.retries": "1", "a.timeout_microseconds": "5"})
    sequences = replace(model_config("b"), sequence_batching=ModelSequenceBatching())
    found = problems(config, model_config("a", is_decoupled=True), sequences)
    assert set(found) == {'parameters["step.a.retries"]', 'parameters["step.b.retries"]'}
    assert "is decoupled" in found['parameters["step.a.retries"]']
    assert "has sequences" in found['parameters["step.b.retries"]']
    assert not problems(ensemble_config(*PLAIN, limits={"b.retries": "0"}), A, sequences)
