"""The command line: one entry point, a command per task. Exit codes: 0 done, 1 failed, 2 misused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from modelserver.cli.output import print_error
from modelserver.errors import ServerError

DEBUG = "--debug"

# Each command with its module and its function there (or the Typer that has its subcommands), and its line in the help.
# A module is imported when one of its commands is called, since what one command needs would keep the others waiting.
# What typer is told beside the function, the module has as SETTINGS.
COMMANDS = {
    "run": ("run.run", "Talk to a language model, or ask any other model once, by its name or path."),
    "pull": ("store.pull", "Bring a model into the store."),
    "push": ("store.push", "Upload a model of the store to the registry in its name."),
    "create": ("store.create", "Make a model in the store by a Modelfile, or from files or another model."),
    "cp": ("store.cp", "Give a model of the store a second name."),
    "rm": ("store.rm", "Remove models from the store."),
    "ls": ("store.ls", "List the models of the store."),
    "stop": ("store.stop", "Unload a model of a running server; its next request loads it again."),
    "serve": ("serve.serve", "Serve model repositories over HTTP and gRPC."),
    "route": ("route.route", "Put one address in front of several identical servers."),
    "deploy": ("cluster.deploy", "Start pools of servers on a Ray cluster, or change those that run, as a file says."),
    "cluster": ("cluster.cluster", "Look at what is deployed in a Ray cluster, and change it."),
    "check": ("check.check", "Validate every model of a repository without serving it."),
    "list": ("models.list_models", "List the models of a running server, or of a repository."),
    "show": ("models.show", "Show a model: its inputs and outputs, its completed config, and its statistics."),
    "load": ("models.load", "Load a model, or load it again; or one version of it."),
    "unload": ("models.unload", "Unload a model, or one version of it."),
    "version": ("models.version", "Print the version of this program, and of a server if one is named."),
    "traffic": ("models.traffic", "Show how versions share a model's requests."),
    "ps": ("usage.ps", "Show the models that serve: instances, queue, requests per second, latency, memory."),
    "top": ("top.top", "Watch a server's models."),
    "logs": ("logs.logs", "Print the newest lines of a server's log."),
    "health": ("models.health", "Check whether a server is ready."),
    "doctor": ("doctor.doctor", "Check ports, limits, shared memory, devices and packages."),
    "infer": ("infer.infer", "Send one request."),
    "chat": ("chat.chat", "Talk to a language model."),
    "batch": ("batch.batch", "Answer files of rows offline: JSON lines, CSV, Parquet, Arrow; resumed after a kill."),
    "bench": ("bench.bench", "Measure a running server: throughput and latency."),
    "tune": ("tune.tune", "Find the instance count, batching and threads that serve a model best."),
    "convert": (
        "convert.convert",
        "Convert PyTorch to ONNX, torch.export or compiled code, ONNX to FP16, and language models to and from GGUF.",
    ),
    "quantize": ("quantize.quantize", "Quantize a model to 8 or 4 bits, and report the loss of accuracy."),
    "build-engine": ("build_engine.build_engine", "Build a TensorRT engine from an ONNX file."),
    "inspect": ("inspect.inspect", "Describe a model file: its kind, its inputs and outputs, and how it was built."),
    "completion": ("completion.completion", "Print the script that completes this program."),
    "keys": ("keys.keys", "Create and list API keys (--api-keys-file)."),
    "manifest": ("manifest.manifest", "Print deployment manifests: for Kubernetes, docker compose, KServe."),
}


# Of the program and of each of its commands.
_SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Commands(Mapping[str, Any]):
    """The commands by name, each made when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        place, function = COMMANDS[name][0].split(".")
        module = importlib.import_module(f"modelserver.cli.{place}")
        command = getattr(module, function)
        registered = typer.Typer(callback=_common, **_SETTINGS)
        if isinstance(command, typer.Typer):
            registered.add_typer(command, name=name)
        else:
            registered.command(name, **getattr(module, "SETTINGS", {}))(command)
        return typer.main.get_group(registered).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _CommandGroup(TyperGroup):
    """The program's commands, listed in the help without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        importlib.import_module("modelserver.cli.models").version()
        raise typer.Exit


def _common(
    _version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `main` has taken --debug out, wherever it stood."""
    del debug


app = typer.Typer(
    name="modelserver",
    cls=_CommandGroup,
    callback=_common,
    help="One server for every kind of model. Start with: modelserver serve --model-repository=DIRECTORY",
    no_args_is_help=True,
    **_SETTINGS,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. A `ServerError` is printed as one sentence; without --debug other errors are, too."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    wants_traceback = DEBUG in words
    words = [word for word in words if word != DEBUG]
    try:
        app(words, prog_name="modelserver")
    except ServerError as error:
        if wants_traceback:
            raise
        print_error(error.message)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our output has closed the pipe (`| head`), so an error message would not be read.
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if wants_traceback:
            raise
        print_error(f"{type(error).__name__}: {error} (run with {DEBUG} for the traceback; this may be a bug)")
        sys.exit(1)


if __name__ == "__main__":
    main()
