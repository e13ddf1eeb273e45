import dataclasses
import enum
import json

import pytest
from google.protobuf import json_format
from hypothesis import given
from support.config_strategies import config_messages, configs

from modelserver.config import schema
from modelserver.config.fields import CLASSES, ENUMS, fields_of
from modelserver.config.message import config_from_json, config_from_message, config_to_json, config_to_message
from modelserver.core.datatype import Datatype
from modelserver.errors import ConfigError
from modelserver.pb import model_config_pb2 as pb


def test_every_message_of_the_proto_has_its_class_and_every_class_its_message() -> None:
    names = set()

    def collect(message) -> None:
        if not message.GetOptions().map_entry:
            names.add(message.full_name.removeprefix("inference."))
        for nested in message.nested_types:
            collect(nested)

    for message in pb.DESCRIPTOR.message_types_by_name.values():
        collect(message)
    assert names - {"ModelParameter"} == set(CLASSES)
    classes = {value for value in vars(schema).values() if dataclasses.is_dataclass(value)}
    assert classes == set(CLASSES.values())


@pytest.mark.parametrize("cls", CLASSES.values(), ids=list(CLASSES))
def test_classes_have_the_fields_of_their_message_in_its_order(cls: type) -> None:
    attributes = [field.name for field in dataclasses.fields(cls)]
    assert sorted(attributes) == sorted(field.attribute for field in fields_of(cls))
    assert cls() == cls(**{attribute: getattr(cls(), attribute) for attribute in attributes})


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_names_and_numbers_of_the_proto(name: str) -> None:
    *messages, last = name.split(".")
    descriptor = pb.DESCRIPTOR.message_types_by_name[messages[0]]
    for nested in messages[1:]:
        descriptor = descriptor.nested_types_by_name[nested]
    values = {value.name: value.number for value in descriptor.enum_types_by_name[last].values}
    ours: type[enum.Enum] = ENUMS[name]
    assert {member.name: member.value for member in ours} == values


def test_defaults_are_those_of_the_proto() -> None:
    assert config_from_message(pb.ModelConfig()) == schema.ModelConfig()


@given(message=config_messages())
def test_messages_survive_the_round_trip(message: pb.ModelConfig) -> None:
    assert config_to_message(config_from_message(message)) == message


@given(config=configs())
def test_configs_survive_json(config: schema.ModelConfig) -> None:
    assert config_from_json(json.dumps(config_to_json(config))) == config


@given(message=config_messages())
def test_json_of_protobuf_is_understood(message: pb.ModelConfig) -> None:
    """64-bit integers as strings, names in camel case or as in the proto, defaults left out or not."""
    config = config_from_message(message)
    for options in ({}, {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}):
        assert config_from_json(json_format.MessageToJson(message, **options)) == config


@given(message=config_messages())
def test_json_has_the_fields_that_protobuf_prints(message: pb.ModelConfig) -> None:
    theirs = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert keys_of(config_to_json(config_from_message(message))) == keys_of(theirs)


def keys_of(value: object) -> object:
    if isinstance(value, dict):
        return {key: keys_of(item) for key, item in value.items()}
    return [keys_of(item) for item in value] if isinstance(value, list) else None


def test_json_prints_primitives_and_leaves_absent_messages_out() -> None:
    config = schema.ModelConfig(
        name="m",
        input=(schema.ModelInput("x", Datatype.BYTES, dims=(-1, 2**40)),),
        parameters={"k": "v"},
        sequence_batching=schema.ModelSequenceBatching(
            direct=schema.SequenceStrategyDirect(minimum_slot_utilization=0.1)
        ),
    )
    document = config_to_json(config)
    assert document["max_batch_size"] == 0
    assert document["output"] == []
    assert document["input"][0]["dims"] == [-1, 2**40]
    assert document["input"][0]["data_type"] == "TYPE_STRING"
    assert document["input"][0]["format"] == "FORMAT_NONE"
    assert document["parameters"] == {"k": {"string_value": "v"}}
    assert document["sequence_batching"]["direct"]["minimum_slot_utilization"] == 0.1
    assert "dynamic_batching" not in document
    assert "reshape" not in document["input"][0]


def test_json_without_a_datatype_says_invalid() -> None:
    assert (
        config_to_json(schema.ModelConfig(input=(schema.ModelInput("x"),)))["input"][0]["data_type"] == "TYPE_INVALID"
    )


def test_one_message_of_json_is_a_list_of_one() -> None:
    config = config_from_json({"instance_group": {"count": 2}, "input": {"name": "x"}})
    assert config == config_from_json({"instance_group": [{"count": 2}], "input": [{"name": "x"}]})


def test_parameters_of_json_may_be_plain_strings() -> None:
    config = config_from_json({"parameters": {"a": "1", "b": {"string_value": "2"}}})
    assert config.parameters == {"a": "1", "b": "2"}


def test_json_reports_every_problem() -> None:
    document = {
        "nam": "x",
        "maxBatchSize": "eight",
        "input": [{"data_type": "FP32", "dims": ["1", 1.5, True, None]}, 3],
        "dynamic_batching": {"priority_levels": -1, "preserve_ordering": "yes"},
        "ensemble_scheduling": {},
        "instance_group": 3,
        "parameters": {"c": 3},
        "model_warmup": [{"batch_size": 2**40}],
        "default_model_filename": 5,
        "optimization": None,
    }
    with pytest.raises(ConfigError) as caught:
        config_from_json(document)
    lines = [str(problem).removeprefix("config override: ") for problem in caught.value.problems]
    datatypes = ", ".join(name for name, _ in pb.DataType.items() if name != "TYPE_INVALID")
    assert lines == [
        "nam: unknown field of ModelConfig; did you mean name?",
        'max_batch_size: expected an integer, got "eight"',
        f'input[0].data_type: expected one of {datatypes}, got "FP32"; did you mean TYPE_FP32?',
        "input[0].dims[1]: expected an integer, got 1.5",
        "input[0].dims[2]: expected an integer, got true",
        "input[0].dims[3]: expected an integer, got null",
        "input[1]: expected an object, got 3",
        "dynamic_batching.priority_levels: expected an integer >= 0, got -1",
        'dynamic_batching.preserve_ordering: expected true or false, got "yes"',
        "ensemble_scheduling: cannot be set beside dynamic_batching: "
        "only one of dynamic_batching, sequence_batching, ensemble_scheduling may be",
        "instance_group: expected a list, got 3",
        'parameters["c"]: expected an object, got 3',
        "model_warmup[0].batch_size: expected an integer in [0, 4294967295], got 1099511627776",
        "default_model_filename: expected a string, got 5",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": ', "config override:1:"),
        ("[1]", "config override: expected an object, got a list"),
        ('"x"', 'config override: expected an object, got "x"'),
        ("[" * 5000, "not valid JSON"),
        ('{"name": "\\ud800"}', "not valid JSON"),
    ],
)
def test_json_that_is_no_object_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_json(text)
    assert expected in str(caught.value)


def test_a_number_without_a_name_is_refused() -> None:
    message = pb.ModelConfig()
    message.instance_group.add().kind = 9
    with pytest.raises(ConfigError, match=r"instance_group\[0\]\.kind: expected one of KIND_AUTO, .*, got 9"):
        config_from_message(message)


def test_values_that_the_proto_cannot_hold_are_refused_all_at_once() -> None:
    config = schema.ModelConfig(
        max_batch_size=2**31, instance_group=(schema.ModelInstanceGroup(count=-(2**40)),), parameters={"k": "v"}
    )
    with pytest.raises(ConfigError) as caught:
        config_to_message(config)
    assert [problem.field for problem in caught.value.problems] == ["max_batch_size", "instance_group[0].count"]


@pytest.mark.parametrize(
    "text",
    [
        '{max_batch_size: 5, name: "it\'s"}',
        "{'max_batch_size': 5, 'name': 'it\\'s'}",
        '{"max_batch_size": 5, "name": "it\'s",}',
        '{ maxBatchSize : "5", "name" : "it\'s", instance_group: [ {count: 1,}, ] }',
    ],
)
def test_json_may_be_as_loose_as_protobuf_takes_it(text: str) -> None:
    config = config_from_json(text)
    assert (config.max_batch_size, config.name) == (5, "it's")


def test_what_is_in_quotes_stays_as_it_is() -> None:
    (parameter,) = config_from_json("""{parameters: {"a: b,}": {string_value: '{"c": [1,]}'}}}""").parameters.items()
    assert parameter == ("a: b,}", '{"c": [1,]}')
