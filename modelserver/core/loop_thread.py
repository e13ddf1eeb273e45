"""An event loop in a thread of its own, for instances that are used without the server's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class LoopThread:
    """Runs from construction until `stop`.

    `on_exit` is called, and the loop continues, when one of its tasks raises SystemExit or the like; without it, that
    ends the loop.
    """

    def __init__(self, name: str, *, on_exit: Callable[[], object] | None = None) -> None:
        self._on_exit = on_exit
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the loop and close it. Blocking; not from the loop's own thread; safe to repeat."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._run_on():
                continue
        finally:
            self.loop.close()

    def _run_on(self) -> bool:
        """Run until `stop`; True if a task tried to end the program before that."""
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            if self._on_exit is None:
                raise
            self._on_exit()
            return True
        return False
