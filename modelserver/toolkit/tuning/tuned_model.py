"""The tuned model on its server: its original state, its changes, and its restoration."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from modelserver.client.control import ControlClient
from modelserver.config.message import config_from_json, config_to_json
from modelserver.config.schema import ModelConfig
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError, UnavailableError

_READY = "READY"


class TunedModel:
    """Made by `borrowed`, which gives the model back as it was. `was_loaded` and `config` are known after `open`."""

    def __init__(self, control: ControlClient, name: str) -> None:
        self.name = name
        self.was_loaded = True
        self.config = ModelConfig()
        self._control = control
        self._document: dict[str, Any] = {}
        self._is_changed = False

    def open(self) -> None:
        """Look how the model is, and load it if it is not. Raises ServerError."""
        self.was_loaded = self._is_ready()
        if not self.was_loaded:
            self._is_changed = True
            self._control.load(self.name)
        self._document = self._control.model_config(self.name)
        self.config = config_from_json(self._document, source=f"config of model '{self.name}'")
        if self.config.is_ensemble:
            raise InvalidArgumentError(
                f"model '{self.name}' is an ensemble, which has no instances of its own: tune its models"
            )

    def _is_ready(self) -> bool:
        rows = [row for row in self._control.index() if row.get("name") == self.name]
        if not rows:
            # Asking for it tells what was meant.
            self._control.model_metadata(self.name)
            raise NotFoundError(f"there is no model '{self.name}'")
        return any(row.get("state") == _READY for row in rows)

    def use(self, config: ModelConfig) -> None:
        """Serve with `config` from here on. Raises ServerError, and then the model serves as before."""
        self._is_changed = True
        self._load_with(config_to_json(config))

    def _load_with(self, document: dict[str, Any]) -> None:
        """Load the model with this config in place of its own."""
        self._control.load(self.name, {"config": json.dumps(document)})

    def give_back(self) -> None:
        """The model as it was: with the config of before, or not loaded. Raises ServerError."""
        if not self._is_changed:
            return
        if not self.was_loaded:
            self._control.unload(self.name)
            return
        self._control.load(self.name)
        # The served config may have been an override itself, or the file may have changed since.
        if self._control.model_config(self.name) != self._document:
            self._load_with(self._document)
        self._is_changed = False


@contextmanager
def borrowed(control: ControlClient, name: str) -> Iterator[TunedModel]:
    """The model for the time of the block; then it is given back, whatever ended the block.

    SIGTERM ends it as Ctrl-C does, and neither disturbs the way back. Raises ServerError; UnavailableError with what to
    do when the model cannot be given back.
    """
    with _terminable():
        model = TunedModel(control, name)
        try:
            model.open()
            yield model
        finally:
            with _undisturbed():
                try:
                    model.give_back()
                except ServerError as error:
                    raise UnavailableError(
                        f"model '{name}' could not be given back its config: {error.message}; "
                        f"do it with: modelserver {'load' if model.was_loaded else 'unload'} {name}"
                    ) from error


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM act as SIGINT meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as set by shells for background jobs
        signal.default_int_handler(number, frame)
    # As Ctrl-C: an event loop that runs ends its tasks in order.
    signal.raise_signal(signal.SIGINT)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM meanwhile: a second Ctrl-C must not leave a stranger's config behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(name, signal.SIG_IGN) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, old, strict=True):
            signal.signal(name, handler)
