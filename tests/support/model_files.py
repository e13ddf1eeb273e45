"""Small model repositories, written where a test wants them."""

from __future__ import annotations

from pathlib import Path

IDENTITY_CONFIG = """
backend: "identity"
max_batch_size: {max_batch_size}
input [ {{ name: "INPUT0", data_type: {data_type}, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: {data_type}, dims: [ -1 ] }} ]
{more}
"""


def write_identity(
    repository: Path,
    name: str = "identity",
    *,
    execute_delay_ms: int = 0,
    creation_delay_sec: float = 0.0,
    max_batch_size: int = 8,
    data_type: str = "TYPE_FP32",
    versions: tuple[int, ...] = (1,),
    more: str = "",
) -> Path:
    """An identity model in `repository`; its directory. `more` is further text of config.pbtxt."""
    parameters = {"execute_delay_ms": execute_delay_ms, "creation_delay_sec": creation_delay_sec}
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
        if value
    ]
    return write_model(
        repository,
        name,
        IDENTITY_CONFIG.format(max_batch_size=max_batch_size, data_type=data_type, more="\n".join([*lines, more])),
        versions=versions,
    )


def write_model(repository: Path, name: str, config: str, *, versions: tuple[int, ...] = (1,)) -> Path:
    """A model with this config.pbtxt and empty version directories; its directory."""
    directory = repository / name
    for version in versions:
        (directory / str(version)).mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(config)
    return directory
