"""The adapters that requests of one engine may name: found by name, read from their files, kept in host memory."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from modelserver.backend import InvalidArgumentError

from ..checkpoint import is_gguf
from ..options import EngineOptions
from .adapter import Adapter, Target, combined
from .gguf_files import read_gguf
from .peft_files import rank_of, read_peft
from .uses import AdapterUse

logger = logging.getLogger(__name__)


class Adapters:
    """Those of one engine; only the engine's thread calls `find`.

    At most `max_kept` adapters that nothing uses are kept in host memory, and read again when they are asked for.
    `usual` are those of requests that name none.
    """

    def __init__(
        self, target: Target, places: Mapping[str, Path], *, max_kept: int, usual: Sequence[AdapterUse] = ()
    ) -> None:
        self.target = target
        self.places = places
        self.usual = tuple(usual)
        self._max_kept = max_kept
        self._kept: OrderedDict[tuple[AdapterUse, ...], Adapter] = OrderedDict()

    @classmethod
    def of(cls, target: Target | None, options: EngineOptions) -> Adapters | None:
        """None for a network that takes no adapters."""
        if target is None:
            return None
        places = {name: Path(place) for name, place in options.lora_modules}
        usual = [AdapterUse(name) for name in options.usual_adapters]
        return cls(target, places, max_kept=options.num_kept_loras, usual=usual)

    def find(self, uses: Collection[AdapterUse]) -> Adapter | None:
        """What these add together; None where they add nothing.

        Raises ServerErrors, which name the adapter, for one that is unknown or cannot be read.
        """
        uses = tuple(use for use in uses or self.usual if use.scale != 0.0)
        if not uses:
            return None
        found = self._kept.get(uses)
        if found is None:
            parts = [(self._read(use), use.scale) for use in uses]
            found = combined(parts)
            if found.rank > self.target.max_rank:
                raise InvalidArgumentError(
                    f"the adapters {found.name} have rank {found.rank} together, which is more than max_lora_rank "
                    f"{self.target.max_rank}: ask for fewer, or raise that option in model.json"
                )
            self._kept[uses] = found
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(uses)
        return found

    def _read(self, use: AdapterUse) -> Adapter:
        place = Path(use.place) if use.place else self.places.get(use.name)
        if place is None:
            raise InvalidArgumentError(
                f"LoRA {use.name:.200} is not supported, we currently support {sorted(self.places)}"
            )
        logger.info("reading the adapter '%s' from %s", use.name, place)
        return read_adapter(use.name, place, self.target)


def read_adapter(name: str, place: Path, target: Target) -> Adapter:
    """Of PEFT's directory, or of a GGUF file. Raises ServerErrors that name the adapter and the file."""
    return read_gguf(name, place, target) if is_gguf(place) else read_peft(name, place, target)


def with_lora_rank(options: EngineOptions) -> EngineOptions:
    """`max_lora_rank`, where it is not set, is enough for all adapters that are listed. Raises as `read_adapter`."""
    if not options.serves_adapters or options.max_lora_rank is not None:
        return options
    ranks = [rank_of(Path(place)) for _, place in options.lora_modules if not is_gguf(Path(place))]
    # Adapters of a Modelfile are added up.
    together = sum(ranks) if options.usual_adapters else 0
    return replace(options, max_lora_rank=max([options.lora_rank, together, *ranks]))
