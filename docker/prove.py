"""Executes the steps of docker/Dockerfile in directories, and serves from the last one; docker/prove.sh runs it.

A stage is a directory that starts as a copy of the stage it is made FROM. RUN is the step's own shell text under
bubblewrap, COPY copies, ENV and ARG are its environment; other instructions are read at the end, to serve as they say.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONTEXT = HERE.parent
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"

# What is asked of the server, from inside of its own container. The words of the image are put in front.
QUESTIONS = """
set -eu
test "$(id -u)" = 1000
if touch /written /opt/modelserver/written 2>/dev/null; then echo "the root can be written to"; exit 1; fi
"$@" & server=$!
tries=0
until {health} >/dev/null 2>&1; do
    kill -0 $server || exit 1
    tries=$((tries + 1)); test $tries -lt 120 || { echo "not ready in time"; exit 1; }
    sleep 1
done
{health}
modelserver list
modelserver chat tiny_chat "hello"
python3 - <<'PYTHON'
import json, urllib.request

def ask(path, document):
    body = json.dumps(document).encode()
    with urllib.request.urlopen(urllib.request.Request("http://localhost:8000" + path, body), timeout=60) as answer:
        return json.load(answer)

tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [3.0, 4.0]}
assert ask("/v2/models/identity/infer", {"inputs": [tensor]})["outputs"][0]["data"] == [3.0, 4.0]
with urllib.request.urlopen("http://localhost:8002/metrics", timeout=60) as answer:
    assert b'nv_inference_request_success{model="identity",version="1"} 1' in answer.read()
PYTHON
kill -TERM $server
wait $server || { echo "the server ended with status $?"; exit 1; }
echo "served, answered and stopped as uid $(id -u) on a read-only root"
"""


@dataclass(slots=True)
class Stage:
    """A stage of the Dockerfile: its directory, and what its instructions have set so far."""

    name: str
    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    words: dict[str, str] = field(default_factory=dict)  # ENTRYPOINT, CMD, HEALTHCHECK, USER as they stand there


def read_instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions and their text, with continued lines as they are and comments left out."""
    instructions: list[tuple[str, str]] = []
    pending = ""
    for line in path.read_text().splitlines():
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        pending += line
        if line.endswith("\\"):
            pending += "\n"
            continue
        word, _, text = pending.partition(" ")
        instructions.append((word.upper(), text.strip()))
        pending = ""
    return instructions


def split_stages(instructions: list[tuple[str, str]]) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """For each stage its parent (a stage or the base image) and its instructions."""
    stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    current: list[tuple[str, str]] | None = None
    for word, text in instructions:
        if word == "FROM":
            parent, _, name = text.split()
            current = []
            stages[name] = (parent, current)
        elif current is not None:
            current.append((word, text))
    return stages


class Builder:
    """Builds the stages that a target needs, each once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stages = split_stages(read_instructions(HERE / "Dockerfile"))
        self._built: dict[str, Stage] = {}

    def build(self, name: str) -> Stage:
        if name in self._built:
            return self._built[name]
        parent_name, instructions = self._stages[name]
        stage = Stage(name, self._directory / name)
        source = self._directory / "base-image"
        if parent_name in self._stages:
            parent = self.build(parent_name)
            source, stage.environment, stage.workdir = parent.root, dict(parent.environment), parent.workdir
        print(f"== stage {name}", flush=True)
        if stage.root.exists():
            shutil.rmtree(stage.root)
        subprocess.run(["cp", "--archive", str(source), str(stage.root)], check=True)
        for word, text in instructions:
            self._execute(stage, word, text)
        self._built[name] = stage
        return stage

    def _execute(self, stage: Stage, word: str, text: str) -> None:
        if word == "RUN":
            self._run(stage, text)
        elif word == "COPY":
            self._copy(stage, text)
        elif word == "ENV":
            self._set_environment(stage, text)
        elif word == "ARG":
            name, _, default = text.partition("=")
            stage.arguments[name] = os.environ.get(name, default)
        elif word == "WORKDIR":
            stage.workdir = text
            (stage.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        else:
            stage.words[word] = text

    def _set_environment(self, stage: Stage, text: str) -> None:
        for part in text.replace("\\\n", " ").split():
            name, _, value = part.partition("=")
            stage.environment[name] = value.replace("$PATH", stage.environment["PATH"])

    def _copy(self, stage: Stage, text: str) -> None:
        *sources, target = [word for word in text.split() if not word.startswith("--")]
        origin = CONTEXT
        if text.startswith("--from="):
            origin = self.build(text.split()[0].removeprefix("--from=")).root
        base = stage.root / (Path(stage.workdir) / target).as_posix().lstrip("/")
        for source in sources:
            path = origin / source.lstrip("/")
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc") if origin is CONTEXT else None
                shutil.copytree(path, base, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                destination = base / path.name if target.endswith("/") else base
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, destination)

    def _run(self, stage: Stage, text: str) -> None:
        print(f"-- RUN {text}", flush=True)
        command = ["bwrap", "--cap-add", "ALL", "--bind", str(stage.root), "/", "--dev", "/dev", "--proc", "/proc"]
        command += ["--perms", "1777", "--tmpfs", "/tmp", "--die-with-parent"]
        for path in ["/etc/resolv.conf", "/etc/ssl/certs", *os.environ.get("PROVE_BINDS", "").split()]:
            command += ["--ro-bind-try", path, path]
        environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= stage.environment | stage.arguments
        command += ["--chdir", stage.workdir, "--clearenv"]
        for name, value in environment.items():
            command += ["--setenv", name, value]
        subprocess.run([*command, "/bin/sh", "-c", text], check=True)


def serve(stage: Stage) -> None:
    """Start the image as an engine would: its user, entry point and command, nothing to write to but the volumes."""
    (stage.root / "etc" / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")  # engines give one, too
    user, _, group = stage.words["USER"].partition(":")
    words = json.loads(stage.words["ENTRYPOINT"]) + json.loads(stage.words["CMD"])
    health = " ".join(json.loads(stage.words["HEALTHCHECK"].partition("CMD ")[2]))
    command = ["bwrap", "--cap-add", "ALL", "--ro-bind", str(stage.root), "/", "--dev", "/dev", "--proc", "/proc"]
    command += ["--perms", "1777", "--tmpfs", "/tmp", "--perms", "1777", "--tmpfs", "/var/cache/modelserver"]
    command += ["--ro-bind", str(CONTEXT / "model_repository"), "/models", "--unshare-net", "--unshare-pid"]
    command += ["--die-with-parent", "--chdir", stage.workdir, "--clearenv"]
    for name, value in stage.environment.items():
        command += ["--setenv", name, value]
    command += ["--setenv", "TINI_SUBREAPER", "1"]  # it is not the first process here, as it is in a container
    command += ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--inh-caps=-all"]
    command += ["--bounding-set=-all", "--no-new-privs"]
    subprocess.run([*command, "/bin/sh", "-c", QUESTIONS.replace("{health}", health), "sh", *words], check=True)


def main() -> None:
    target, directory = sys.argv[1], Path(sys.argv[2])
    serve(Builder(directory).build(target))


if __name__ == "__main__":
    main()
