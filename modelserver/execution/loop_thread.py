"""An event loop of its own in a thread, for instances that are used without the server's."""

from __future__ import annotations

import asyncio
import threading


class LoopThread:
    """Runs from its making until `stop`."""

    def __init__(self, name: str) -> None:
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
            self.loop.run_forever()
        finally:
            self.loop.close()
