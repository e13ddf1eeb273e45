"""Excludes objects that live as long as the process from Python's garbage collection."""

from __future__ import annotations

import gc


def keep_for_good() -> None:
    """Freeze all current objects: the collector does not visit them again.

    A full collection starts only when the number of new objects reaches a quarter of the survivors of the last one.
    The last run must therefore happen after the freeze, with almost no survivors. Counted from all frozen objects, that
    quarter is some 20,000 objects, and the reference cycles of a thousand unloaded models would wait for them.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
