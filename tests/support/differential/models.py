"""The repository that both servers of the differential tests serve: one table of models, written where wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).parent / "sources"

DATATYPES = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "STRING",
)


@dataclass(frozen=True)
class Entry:
    """A model: `source` is a file of `sources/`, none for models without files; `files` are further ones, by path."""

    config: str | None
    source: str | None = None
    versions: tuple[str, ...] = ("1",)
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        if self.config is not None:
            (directory / "config.pbtxt").write_text(self.config)
        for version in self.versions:
            (directory / version).mkdir()
            if self.source is not None:
                (directory / version / "model.py").write_text((SOURCES / f"{self.source}.py").read_text())
        for name, text in self.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)


def _tensor(name: str, data_type: str, dims: str = "-1", more: str = "") -> str:
    return f'{{ name: "{name}", data_type: TYPE_{data_type}, dims: [ {dims} ] {more} }}'


def config(*, inputs: tuple[str, ...], outputs: tuple[str, ...], max_batch_size: int = 0, more: str = "") -> str:
    """A config.pbtxt of a Python model. A tensor is "NAME TYPE dims"; dims "-1" if left out."""

    def tensors(field_name: str, texts: tuple[str, ...]) -> str:
        parts = [text.split(" ", 3) for text in texts]
        return f"{field_name} [ {', '.join(_tensor(*part) for part in parts)} ]\n"

    head = f'backend: "python"\nmax_batch_size: {max_batch_size}\n'
    return head + tensors("input", inputs) + tensors("output", outputs) + more


_ADD_SUB = {"inputs": ("INPUT0 FP32 4", "INPUT1 FP32 4"), "outputs": ("OUTPUT0 FP32 4", "OUTPUT1 FP32 4")}
_ECHO = {"inputs": ("INPUT0 FP32",), "outputs": ("OUTPUT0 FP32",)}
_VERSION = {"inputs": ("INPUT0 INT32 1",), "outputs": ("VERSION INT32 1", "TOLD STRING 1")}
_CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]"""
_SEQUENCE = {"inputs": ("INPUT INT32 1",), "outputs": ("OUTPUT INT32 1", "CONTROLS INT64 4")}
_STATE = """
sequence_batching { state [ {
  input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ]
  initial_state: { name: "begin" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }
} ] }"""


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], more: str = "") -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} {more} }}'


def _ensemble(steps: list[str], inputs: tuple[str, ...], outputs: tuple[str, ...], max_batch_size: int = 0) -> Entry:
    text = config(inputs=inputs, outputs=outputs, max_batch_size=max_batch_size)
    text = text.replace('backend: "python"', 'platform: "ensemble"')
    return Entry(text + f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n")


def _echo_of(*data_types: str) -> str:
    optional = "".join(
        ("input " + _tensor(f"INPUT_{name}", name, more=", optional: true") + "\n")
        + ("output " + _tensor(f"OUTPUT_{name}", name) + "\n")
        for name in data_types
    )
    return f'backend: "python"\nmax_batch_size: 0\n{optional}'


_TWO_ADD_SUBS = [
    _step("add_sub", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "SUM", "OUTPUT1": "DIFFERENCE"}),
    _step("add_sub", {"INPUT0": "SUM", "INPUT1": "DIFFERENCE"}, {"OUTPUT0": "TWICE_A", "OUTPUT1": "TWICE_B"}),
]
_FAILING_STEP = [_step("failing", {"INPUT0": "WAY"}, {"OUTPUT0": "TEXT"})]

# Loaded at the start.
LOADED: dict[str, Entry] = {
    "echo": Entry(config(**_ECHO, max_batch_size=8), "echo"),
    "echo_fixed": Entry(config(inputs=("INPUT0 FP32 2,2",), outputs=("OUTPUT0 FP32 2,2",), max_batch_size=2), "echo"),
    "echo_text": Entry(config(inputs=("INPUT0 STRING",), outputs=("OUTPUT0 STRING",)), "echo"),
    "echo_half": Entry(config(inputs=("INPUT0 FP16",), outputs=("OUTPUT0 FP16",)), "echo"),
    "echo_types": Entry(_echo_of(*DATATYPES), "echo"),
    "echo_reshaped": Entry(
        config(
            inputs=("INPUT0 FP32 4 , reshape: { shape: [ 2, 2 ] }",),
            outputs=("OUTPUT0 FP32 4 , reshape: { shape: [ 2, 2 ] }",),
            max_batch_size=4,
        ),
        "echo",
    ),
    "add_sub": Entry(config(**_ADD_SUB), "add_sub"),
    "add_sub_optional": Entry(
        config(**_ECHO, more="input " + _tensor("INPUT1", "FP32", more=", optional: true") + "\n")
        + "output "
        + _tensor("OUTPUT1", "FP32")
        + "\n",
        "echo",
    ),
    "many_versions": Entry(config(**_VERSION, more="version_policy { all { } }"), "version", ("1", "2", "10")),
    "latest_two": Entry(
        config(**_VERSION, more="version_policy { latest { num_versions: 2 } }"), "version", ("1", "2", "3")
    ),
    "specific": Entry(
        config(**_VERSION, more="version_policy { specific { versions: [ 1, 3, 9 ] } }"), "version", ("1", "2", "3")
    ),
    "odd_directories": Entry(config(**_VERSION), "version", ("1", "02", "x")),
    "batching": Entry(
        config(
            **_ECHO,
            max_batch_size=8,
            more="dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }",
        ),
        "echo",
    ),
    "batching_default": Entry(config(**_ECHO, max_batch_size=8, more="dynamic_batching { }"), "echo"),
    "priorities": Entry(
        config(
            **_ECHO,
            max_batch_size=4,
            more="dynamic_batching { priority_levels: 3 default_priority_level: 2 "
            "default_queue_policy { default_timeout_microseconds: 5000000 allow_timeout_override: true "
            "max_queue_size: 10 } priority_queue_policy { key: 1 value: { timeout_action: DELAY } } }",
        ),
        "echo",
    ),
    "instances": Entry(config(**_ECHO, more='instance_group [ { count: 2 kind: KIND_CPU name: "g" } ]'), "echo"),
    "told": Entry(config(inputs=("INPUT0 INT32 1",), outputs=("TOLD STRING 1", "OTHER INT32 1")), "tell"),
    "failing": Entry(config(inputs=("INPUT0 STRING 1",), outputs=("OUTPUT0 STRING 1",)), "failing"),
    "repeat": Entry(
        config(inputs=("IN INT32 1",), outputs=("OUT INT32 1",), more="model_transaction_policy { decoupled: true }"),
        "repeat",
    ),
    "sequence": Entry(
        config(**_SEQUENCE, max_batch_size=4, more=f"sequence_batching {{ direct {{ }} {_CONTROLS} }}"), "accumulate"
    ),
    "sequence_oldest": Entry(
        config(**_SEQUENCE, max_batch_size=4, more=f"sequence_batching {{ oldest {{ }} {_CONTROLS} }}"), "accumulate"
    ),
    "sequence_state": Entry(
        config(inputs=("INPUT INT32 1",), outputs=("OUTPUT INT32 1",), max_batch_size=4, more=_STATE), "state"
    ),
    "completed": Entry(None, "completed"),
    "classes": Entry(
        config(inputs=("INPUT0 FP32 4",), outputs=("OUTPUT0 FP32 4",), max_batch_size=2).replace(
            '"OUTPUT0", data_type', '"OUTPUT0", label_filename: "labels.txt", data_type'
        ),
        "echo",
        files={"labels.txt": "zero\none\ntwo\nthree\n"},
    ),
    "ensemble": _ensemble(_TWO_ADD_SUBS, ("A FP32 4", "B FP32 4"), ("TWICE_A FP32 4", "TWICE_B FP32 4")),
    "ensemble_failing": _ensemble(_FAILING_STEP, ("WAY STRING 1",), ("TEXT STRING 1",)),
    "ensemble_repeat": _ensemble([_step("repeat", {"IN": "N"}, {"OUT": "R"})], ("N INT32 1",), ("R INT32 1",)),
    "calling": Entry(config(inputs=("WAY STRING 1",), outputs=("TOLD STRING 1",)), "caller"),
    "surface": Entry(config(inputs=("WAY STRING 1",), outputs=("TOLD STRING 1",)), "surface"),
    # For what is counted, so that other cases do not add to it.
    "counted": Entry(config(**_ECHO, max_batch_size=8), "echo"),
    "counted_failing": Entry(config(inputs=("INPUT0 STRING 1",), outputs=("OUTPUT0 STRING 1",)), "failing"),
    "counted_repeat": Entry(
        config(inputs=("IN INT32 1",), outputs=("OUT INT32 1",), more="model_transaction_policy { decoupled: true }"),
        "repeat",
    ),
    "counted_sequence": Entry(
        config(**_SEQUENCE, max_batch_size=4, more=f"sequence_batching {{ direct {{ }} {_CONTROLS} }}"), "accumulate"
    ),
    "counted_part": Entry(config(**_ADD_SUB), "add_sub"),
    "counted_ensemble": _ensemble(
        [step.replace('"add_sub"', '"counted_part"') for step in _TWO_ADD_SUBS],
        ("A FP32 4", "B FP32 4"),
        ("TWICE_A FP32 4", "TWICE_B FP32 4"),
    ),
}

# There, and only loaded by cases.
UNLOADED: dict[str, Entry] = {
    "later": Entry(config(**_ECHO), "echo"),
    "later_versions": Entry(config(**_VERSION, more="version_policy { all { } }"), "version", ("1", "2")),
    "overridden": Entry(config(**_ECHO), "echo"),
    "from_files": Entry(config(**_ECHO), "echo"),
    "never": Entry(config(**_ECHO), "echo"),
    "dependent_part": Entry(config(**_ADD_SUB), "add_sub"),
    "dependent": _ensemble(
        [step.replace('"add_sub"', '"dependent_part"') for step in _TWO_ADD_SUBS],
        ("A FP32 4", "B FP32 4"),
        ("TWICE_A FP32 4", "TWICE_B FP32 4"),
    ),
    "cached": Entry(config(**_ECHO, max_batch_size=8, more="response_cache { enable: true }"), "echo"),
    "limited": Entry(
        config(
            **_ECHO,
            max_batch_size=8,
            more="instance_group [ { kind: KIND_CPU count: 2 rate_limiter "
            '{ resources [ { name: "R1" count: 2 } ] priority: 2 } } ]',
        ),
        "echo",
    ),
    "bad_initialize": Entry(config(**_ECHO), "broken"),
    "bad_syntax": Entry(config(**_ECHO), files={"1/model.py": "def broken(:\n"}),
    "bad_import": Entry(config(**_ECHO), files={"1/model.py": "import a_module_that_is_not_there\n"}),
    "bad_class": Entry(config(**_ECHO), files={"1/model.py": "x = 1\n"}),
    "bad_no_execute": Entry(
        config(**_ECHO),
        files={"1/model.py": "class TritonPythonModel:\n    def initialize(self, args):\n        pass\n"},
    ),
    "bad_no_file": Entry(config(**_ECHO)),
    "bad_no_version": Entry(config(**_ECHO), versions=()),
    "bad_text": Entry("nonsense {", "echo"),
    "bad_field": Entry(config(**_ECHO, more="no_such_field: 1"), "echo"),
    "bad_name": Entry('name: "other"\n' + config(**_ECHO), "echo"),
    "bad_backend": Entry(config(**_ECHO).replace('"python"', '"no_such_backend"'), "echo"),
    "bad_dims": Entry(config(inputs=("INPUT0 FP32 0",), outputs=("OUTPUT0 FP32 1",)), "echo"),
    "bad_batch_size": Entry(config(**_ECHO, max_batch_size=-1), "echo"),
    "bad_preferred": Entry(
        config(**_ECHO, max_batch_size=4, more="dynamic_batching { preferred_batch_size: [ 8 ] }"), "echo"
    ),
    "bad_no_batch": Entry(config(**_ECHO, more="dynamic_batching { }"), "echo"),
    "bad_level": Entry(
        config(**_ECHO, max_batch_size=4, more="dynamic_batching { priority_levels: 2 default_priority_level: 3 }"),
        "echo",
    ),
    "bad_gpu": Entry(config(**_ECHO, more="instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]"), "echo"),
    "bad_specific": Entry(config(**_ECHO, more="version_policy { specific { versions: [ 7 ] } }"), "echo"),
    "bad_reshape": Entry(config(inputs=("INPUT0 FP32 4 ,reshape:{shape:[3]}",), outputs=("OUTPUT0 FP32",)), "echo"),
    "bad_control": Entry(
        config(
            **_SEQUENCE,
            max_batch_size=4,
            more="sequence_batching { control_input [ "
            '{ name: "START" control [ { kind: CONTROL_SEQUENCE_START } ] } ] }',
        ),
        "accumulate",
    ),
    "bad_control_twice": Entry(
        config(
            **_SEQUENCE,
            max_batch_size=4,
            more="sequence_batching { control_input [ "
            '{ name: "A" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] }, '
            '{ name: "B" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }',
        ),
        "accumulate",
    ),
    "bad_cache": Entry(config(**_ECHO, more="response_cache { enable: true }"), "echo"),
    "bad_warmup": Entry(
        config(
            **_ECHO,
            more='model_warmup [ { name: "w" batch_size: 1 inputs { key: "NO" value: '
            "{ data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } } ]",
        ),
        "echo",
    ),
    "bad_ensemble_empty": Entry('platform: "ensemble"\nmax_batch_size: 0\nensemble_scheduling { }\n'),
    "bad_ensemble_model": _ensemble(
        [_step("no_such_model", {"INPUT0": "A"}, {"OUTPUT0": "B"})], ("A FP32",), ("B FP32",)
    ),
    "bad_ensemble_cycle": _ensemble([_step("bad_ensemble_cycle", {"A": "A"}, {"B": "B"})], ("A FP32",), ("B FP32",)),
    "bad_ensemble_tensor": _ensemble(
        [_step("add_sub", {"INPUT0": "A", "INPUT1": "NOWHERE"}, {"OUTPUT0": "B"})], ("A FP32 4",), ("B FP32 4",)
    ),
    "bad_ensemble_unused": _ensemble(
        [_step("echo_text", {"INPUT0": "A"}, {"OUTPUT0": "B"})], ("A STRING", "Z STRING"), ("B STRING",)
    ),
    "bad_ensemble_type": _ensemble(
        [_step("add_sub", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "C"})], ("A INT32 4", "B FP32 4"), ("C FP32 4",)
    ),
    "bad_ensemble_input": _ensemble(
        [_step("add_sub", {"INPUT0": "A", "NOT_AN_INPUT": "B"}, {"OUTPUT0": "C"})],
        ("A FP32 4", "B FP32 4"),
        ("C FP32 4",),
    ),
}


def write_repository(root: Path) -> None:
    """All of them below `root`."""
    for name, entry in (LOADED | UNLOADED).items():
        entry.write(root / name)
