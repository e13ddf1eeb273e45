"""PyTorch programs compiled ahead of time by AOTInductor, for this kind of machine. Needs torch and a C++ compiler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from modelserver.errors import UnavailableError, UnsupportedError
from modelserver.toolkit.torch_module import first_line, load_program, quiet_torch, torch_library

_COMPILERS = ("g++", "c++", "clang++")


def write_package(program_path: Path, path: Path, *, shown: str) -> None:
    """Compile a torch.export program into an AOTInductor package; takes half a minute and more.

    Raises UnavailableError without a compiler, UnsupportedError when it cannot be compiled.
    """
    torch = torch_library()
    wanted = os.environ.get("CXX")
    if shutil.which(wanted) is None if wanted else not any(map(shutil.which, _COMPILERS)):
        raise UnavailableError(
            f"AOTInductor needs a C++ compiler, and there is no {wanted or ' or '.join(_COMPILERS)}: "
            "apt-get install g++, or name one in the variable CXX"
        )
    program = load_program(program_path)
    try:
        with quiet_torch(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=_settings(torch, program)
            )
    except Exception as error:  # compilers of several kinds, each with its own errors
        raise UnsupportedError(f"AOTInductor cannot compile '{shown}': {first_line(error)}") from error


def _settings(torch: Any, program: Any) -> dict[str, object]:
    """Without the library's check of smallest sizes, unless the program has some itself.

    Torch's compiler takes every variable size for 2 at least, refuses 1 for that reason alone, and says that the check
    may go (`torch._inductor.config.aot_inductor.check_lowerbound`). Who calls compares a row alone, too.
    """
    smallest = max((bounds.lower for bounds in program.range_constraints.values()), default=0)
    has_switch = hasattr(torch._inductor.config.aot_inductor, "check_lowerbound")
    return {"aot_inductor.check_lowerbound": False} if has_switch and smallest <= 1 else {}
