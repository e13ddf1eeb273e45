"""Makes the pictures of a terminal in the gallery: `python docs/screens.py`.

It serves model_repository/, runs the commands below against that server, and writes what each printed as an SVG file in
docs/images/screens/. The pictures name no font of the network.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images" / "screens"
PORTS = {"http": 18000, "grpc": 18001, "metrics": 18002}
COMMANDS = {
    "list": "modelserver list",
    "infer": "modelserver infer digits_pipeline --input picture=@docs/images/digit-7.png",
    "chat": 'modelserver chat tiny_chat "What does os.path.join do?" --temperature 0 --max-tokens 60',
    "bench": "modelserver bench -m digits_onnx --concurrency-range 1:8:7 --measurement-interval 1000 -s 50",
    "ps": "modelserver ps",
}
_COLUMNS = 110
_WIDER = {"ps": 150}
_PATIENCE = 60  # health checks, each of which takes about a second
_FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


@contextmanager
def serving(env: Mapping[str, str]) -> Iterator[None]:
    """A server over the example models, until the end of the block."""
    flags = [f"--{name}-port={port}" for name, port in PORTS.items()]
    command = [sys.executable, "-m", "modelserver", "serve", "--model-repository=model_repository", *flags]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(_PATIENCE):
                if run("modelserver health", env, check=False).returncode == 0:
                    break
            yield
        finally:
            server.terminate()


def run(command: str, env: Mapping[str, str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one of our commands, which prints in colours."""
    words = [sys.executable, "-m", *shlex.split(command)]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=check, timeout=120)


def picture(command: str, printed: str, columns: int) -> str:
    """An SVG of a terminal in which `command` printed this."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(printed.rstrip("\n")))
    return console.export_svg(title="", theme=MONOKAI, code_format=_FORMAT, unique_id="screen")


def main() -> None:
    env = {
        **os.environ,
        "FORCE_COLOR": "1",
        "MODELSERVER_URL": f"localhost:{PORTS['http']}",
    }
    IMAGES.mkdir(parents=True, exist_ok=True)
    with serving(env):
        for name, command in COMMANDS.items():
            columns = _WIDER.get(name, _COLUMNS)
            printed = run(command, {**env, "COLUMNS": str(columns)}).stdout
            (IMAGES / f"{name}.svg").write_text(picture(command, printed, columns))


if __name__ == "__main__":
    main()
