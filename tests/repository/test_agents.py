"""Repository agents: how they are found, what they may do, and how long what they make lives."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.repositories import IDENTITY_CONFIG, GatedLoader, infer, open_repository, write_model

from modelserver.errors import ErrorCode, InternalError, InvalidArgumentError, NotFoundError, ServerError
from modelserver.repository.agents import ChecksumAgent, find_agent
from modelserver.repository.options import DefinitionOptions
from modelserver.repository.repository import ModelRepository

AGENT = """
from pathlib import Path
from modelserver.repoagent import InvalidArgumentError, RepositoryAgent

class Agent(RepositoryAgent):
    def load(self):
        {load}

    def unload(self):
        with open(self.context.parameters["log"], "a") as log:
            log.write("unload " + self.context.model_directory.name + "\\n")

AGENT = Agent
"""
# Puts a directory in the place of the model's, with the weights that the parameters say.
REPLACE = """
        target = self.context.workspace / "model"
        (target / "4").mkdir(parents=True)
        (target / "4" / "weights").write_text(self.context.parameters["weights"])
        config = (self.context.model_directory / "config.pbtxt").read_text()
        (target / "config.pbtxt").write_text(config.replace("max_batch_size: 8", "max_batch_size: 5"))
        return target
"""


def agents(*entries: tuple[str, dict[str, Any]]) -> str:
    """The part of a config that names agents and their parameters."""
    listed = []
    for name, parameters in entries:
        given = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
        listed.append(f'agents {{ name: "{name}" {given} }}')
    return f"model_repository_agents {{ {' '.join(listed)} }}"


class Bench:
    """A model repository and a directory of agents."""

    def __init__(self, tmp_path: Path) -> None:
        self.models = tmp_path / "models"
        self.agents = tmp_path / "agents"
        self.agents.mkdir()
        self.log = tmp_path / "log"

    def write_agent(self, name: str, load: str = "return None") -> None:
        (self.agents / f"{name}.py").write_text(AGENT.format(load=load.strip()))

    def write_model(self, *entries: tuple[str, dict[str, Any]], versions: tuple[int, ...] = (1,)) -> Path:
        given = [(name, {"log": self.log} | parameters) for name, parameters in entries]
        return write_model(self.models, "m", versions=versions, extra=agents(*given))

    def open(self, **options: Any) -> Any:
        definition = DefinitionOptions(agent_directory=self.agents)
        return open_repository(self.models, definition=definition, **({"load_models": ("m",)} | options))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Bench(tmp_path)


def reason(repository: ModelRepository) -> str:
    (row,) = repository.index()
    return f"{row.state.value} {row.reason}"


async def test_an_agent_puts_another_directory_in_place(bench: Bench, tmp_path: Path) -> None:
    bench.write_agent("replace", REPLACE)
    bench.write_model(("replace", {"weights": "decrypted"}))
    async with bench.open() as repository:
        assert repository.ready_versions("m") == (4,)
        model = repository.get("m", None)
        assert model.config.max_batch_size == 5
        directory = repository._lifecycles["m"].loaded[4].definition.versions[4]
        assert (directory / "weights").read_text() == "decrypted"
        await infer(repository, "m")
        await repository.load("m")
        assert repository.get("m", None) is not model
        await repository._lifecycles["m"].wait_idle()
        assert bench.log.read_text() == "unload m\n"
    assert bench.log.read_text() == "unload m\nunload m\n"
    assert not list((tmp_path / "temporary").iterdir())


async def test_agents_see_what_the_one_before_left_and_unload_in_reverse(bench: Bench) -> None:
    bench.write_agent("first", REPLACE)
    bench.write_agent("second", 'assert (self.context.model_directory / "4" / "weights").read_text() == "one"')
    bench.write_model(("first", {"weights": "one"}), ("second", {}))
    async with bench.open() as repository:
        assert repository.ready_versions("m") == (4,)
    assert bench.log.read_text() == "unload model\nunload m\n"


async def test_a_verifying_agent_lets_versions_be_kept(bench: Bench) -> None:
    bench.write_agent("look")
    bench.write_model(("look", {}))
    async with bench.open() as repository:
        model = repository.get("m", None)
        await repository.load("m")
        assert repository.get("m", None) is model
    assert bench.log.read_text() == "unload m\nunload m\n", "once for each load"


@pytest.mark.parametrize(
    ("load", "code", "words"),
    [
        ('raise InvalidArgumentError("the signature is wrong")', ErrorCode.INVALID_ARGUMENT, "the signature is wrong"),
        ("return 1 / 0", ErrorCode.INTERNAL, "ZeroDivisionError: division by zero"),
        ('return Path("/nowhere")', ErrorCode.INTERNAL, "expected it to return a directory or None, got '/nowhere'"),
    ],
)
async def test_an_agent_that_fails_fails_the_load(
    bench: Bench, tmp_path: Path, load: str, code: ErrorCode, words: str
) -> None:
    bench.write_agent("good")
    bench.write_agent("bad", load)
    bench.write_model(("good", {}))
    async with bench.open() as repository:
        model = repository.get("m", None)
        bench.write_model(("good", {}), ("bad", {}))
        with pytest.raises(ServerError) as failed:
            await repository.load("m")
        assert failed.value.code is code
        assert failed.value.message.startswith(f"failed to load 'm', repository agent 'bad' of model 'm': {words}")
        assert repository.get("m", None) is model
        assert "unload m\n" in bench.log.read_text(), "the good one before it is told"
        assert words in reason(repository)
    assert not list((tmp_path / "temporary").iterdir())


async def test_a_version_that_fails_to_load_releases_what_agents_made(bench: Bench, tmp_path: Path) -> None:
    bench.write_agent("replace", REPLACE)
    bench.write_model(("replace", {"weights": "w"}))
    loader = GatedLoader()
    loader.fail("m", 4)
    async with bench.open(loader=loader) as repository:
        assert "out of memory" in reason(repository)
    assert bench.log.read_text() == "unload m\n"
    assert not list((tmp_path / "temporary").iterdir())


async def test_agents_look_at_files_that_come_with_a_request(bench: Bench) -> None:
    bench.write_model(versions=(1,))
    wrong, right = (hashlib.sha256(content).hexdigest() for content in (b"other", b"sent"))
    config = (
        '{"backend": "identity", "max_batch_size": 8, "model_repository_agents": {"agents": [{"name": "checksum", '
        '"parameters": {"SHA256:1/weights": "%s"}}]}, '
        '"input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}], '
        '"output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}]}'
    )
    async with bench.open() as repository:
        with pytest.raises(ServerError, match=f"for file 1/weights, expect: {wrong}, got: {right}"):
            await repository.load("m", config_json=config % wrong, files={"1/weights": b"sent"})
        await repository.load("m", config_json=config % right, files={"1/weights": b"sent"})
        await infer(repository, "m")


async def test_a_failing_unload_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.write_agent("look")
    bench.write_model(("look", {"log": bench.log / "missing" / "file"}))
    async with bench.open():
        pass
    assert "failed to unload" in caplog.text


# Finding.


def test_the_bundled_one_is_found_and_the_operators_own_comes_first(tmp_path: Path) -> None:
    assert find_agent("checksum", None) is ChecksumAgent
    assert find_agent("checksum", tmp_path) is ChecksumAgent
    package = tmp_path / "checksum"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import AGENT")
    (package / "inner.py").write_text(AGENT.format(load="return None"))
    assert find_agent("checksum", tmp_path).__module__.startswith("modelserver_external_agent_checksum")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, NotFoundError, "unknown repository agent 'mine': expected mine.py or mine/__init__.py"),
        ("AGENT = 3", InternalError, "holding a subclass of modelserver.repoagent.RepositoryAgent, found 3"),
        ("import no_such_module", InternalError, "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_is_no_agent(tmp_path: Path, text: str | None, error: type[Exception], words: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(error, match=words):
        find_agent("mine", tmp_path)


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "a.b"])
def test_names_are_no_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a name of letters"):
        find_agent(name, tmp_path)


# Checksums.

WEIGHTS = b"weights of 1"


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"MD5:1/weights": hashlib.md5(WEIGHTS).hexdigest()},
        {"SHA256:1/weights": hashlib.sha256(WEIGHTS).hexdigest().upper()},
        {"MD5:1/weights": hashlib.md5(WEIGHTS).hexdigest(), "SHA256:1/weights": hashlib.sha256(WEIGHTS).hexdigest()},
    ],
)
async def test_right_checksums_let_a_model_load(tmp_path: Path, parameters: dict[str, str]) -> None:
    write_model(tmp_path, "m", config=IDENTITY_CONFIG + agents(("checksum", parameters)))
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        await infer(repository, "m")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"MD5:1/weights": "00"}, "Mismatched MD5 hash for file 1/weights, expect: 00, got: "),
        ({"SHA256:1/weights": "00"}, "Mismatched SHA256 hash for file 1/weights, expect: 00, got: "),
        ({"MD5:1/missing": "00"}, "'1/missing' cannot be read to verify its MD5: No such file"),
        ({"CRC:1/weights": "00"}, "expected parameters 'MD5:<file>' or 'SHA256:<file>', got 'CRC:1/weights'"),
        ({"MD5:../m/1/weights": "00"}, "without empty, '.' or '..' parts"),
    ],
)
async def test_wrong_checksums_do_not(tmp_path: Path, parameters: dict[str, str], words: str) -> None:
    write_model(tmp_path, "m", config=IDENTITY_CONFIG + agents(("checksum", parameters)))
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        assert "repository agent 'checksum' of model 'm'" in reason(repository)
        assert words in reason(repository)
