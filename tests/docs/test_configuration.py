"""Generated pages say what the code does: every flag, config field, backend parameter and HTTP route."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from docs.generate import (
    CONFIGURATION,
    PAGES,
    SECTIONS,
    STATES,
    distributions,
    messages,
    read_extras,
    read_fields,
    read_routes,
    rewritten,
    served_routes,
    spelled_out,
)
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.problem import Problem
from modelserver.config.schema import ModelConfig
from modelserver.frontends.grpc import head as grpc_parameters
from modelserver.options.sources import read_file
from modelserver.options.table import option_table
from modelserver.repository.unsupported import ignored_warnings, unsupported_problems

ROOT = Path(__file__).resolve().parents[2]
TEXT = CONFIGURATION.read_text()
FIELDS = read_fields()

# Together they set every field that is refused or warned about; a model has one scheduler.
ENSEMBLE = "ensemble_scheduling { }"
EVERYTHING = """
    runtime: "r"
    model_operations { op_library_filename: "l.so" }
    model_transaction_policy { decoupled: true }
    model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" } } }
    input { is_non_linear_format_io: true }
    output { is_non_linear_format_io: true label_filename: "l" }
    optimization { eager_batching: true gather_kernel_buffer_threshold: 1 }
    instance_group { secondary_devices { } }
"""
MESSAGE_OF = {
    "": "ModelConfig",
    "input": "ModelInput",
    "output": "ModelOutput",
    "optimization": "ModelOptimizationPolicy",
    "instance_group": "ModelInstanceGroup",
    "model_transaction_policy": "ModelTransactionPolicy",
    "model_operations": "ModelOperations",
}


def test_the_generated_parts_are_fresh() -> None:
    texts = [page.read_text() for page in PAGES]
    assert set(re.findall(r"<!-- begin: (\w+) -->", "".join(texts))) == set(SECTIONS)
    assert [rewritten(text) for text in texts] == texts, "run: python docs/generate.py"


def test_every_route_is_listed_and_no_other() -> None:
    keys = [key for entries in read_routes().values() for key in entries]
    listed = [name for key in keys for name in spelled_out(key)]
    assert sorted(listed) == sorted(served_routes()), "mend openapi/routes.toml, and run: python docs/generate.py"


def test_routes_of_one_entry_need_the_same_key() -> None:
    served = served_routes()
    for entries in read_routes().values():
        for key in entries:
            needs = {served[name].needs for name in spelled_out(key)}
            assert len(needs) == 1, key


def test_every_extra_is_explained_and_no_other() -> None:
    assert sorted(read_extras()) == sorted(distributions())


def test_every_flag_is_listed() -> None:
    missing = [option.flag_name for option in option_table() if f"| `{option.flag_name}`" not in TEXT]
    assert not missing


def test_every_config_field_is_listed_and_no_other() -> None:
    known = {name: [field.name for field in message.fields] for name, message in messages().items()}
    assert {name: sorted(entries) for name, entries in FIELDS.items()} == {
        name: sorted(fields) for name, fields in known.items()
    }


@pytest.mark.parametrize("message", [name for name in FIELDS if FIELDS[name]])
def test_the_state_of_a_field_is_a_known_word_and_its_files_name_it(message: str) -> None:
    for name, entry in FIELDS[message].items():
        assert entry.state in STATES, f"{message}.{name}"
        assert bool(entry.files) or entry.state in ("warned", "refused"), f"{message}.{name} acts nowhere"
        for file in entry.files:
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{message}.{name} is not in {file}"


@pytest.mark.parametrize(("state", "find"), [("refused", unsupported_problems), ("warned", ignored_warnings)])
def test_what_is_refused_and_warned_about_is_said_to_be(
    state: str, find: Callable[[ModelConfig, str], Sequence[Problem]]
) -> None:
    configs = [parse_pbtxt(text, "all").config for text in (EVERYTHING, ENSEMBLE)]
    found = {_entry(problem.field) for config in configs for problem in find(config, "all")}
    documented = {
        (message, name)
        for message, entries in FIELDS.items()
        for name, entry in entries.items()
        if entry.state == state and message in MESSAGE_OF.values() and not entry.note.startswith(("With ", "See "))
    }
    assert found == documented


def _entry(path: str) -> tuple[str, str]:
    parent, _, name = re.sub(r"\[\d+\]", "", path).rpartition(".")
    return MESSAGE_OF[parent], name


def test_every_parameter_that_a_backend_reads_is_listed() -> None:
    read: set[str] = set()
    for path in (ROOT / "backends").rglob("*.py"):
        text = path.read_text()
        read |= set(re.findall(r'parameter\(\s*"([\w-]+)"', text))
        read |= set(re.findall(r'(?:options\.get\(|_thread_count\(context, )\s*"([\w-]+)"', text))
    assert {"intra_op_thread_count", "INFERENCE_MODE", "stub-timeout-seconds"} <= read, "the patterns find nothing"
    assert not {name for name in read if f"`{name}`" not in TEXT}


def test_every_reserved_request_parameter_is_listed() -> None:
    reserved = {
        *grpc_parameters._RESERVED,
        grpc_parameters.EMPTY_FINAL_RESPONSE,
        grpc_parameters.REGION,
        grpc_parameters.CLASSIFICATION,
    }
    assert not {key for key in reserved if f"`{key}`" not in TEXT}


def test_the_example_of_a_config_file_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "options.yaml").write_text(example)
    values = read_file(tmp_path / "options.yaml")
    assert values["http_port"] == 9000
    assert values["model_repository"] == ("/models/vision", "/models/text")
