"""OLMo 2 and 3: norms behind attention and feed-forward, and over all heads together."""

from __future__ import annotations

from ..decoder_config import DecoderConfig
from .family import Family
from .readers import Entries, base_config, layer_types, typed_windows, with_ropes_by_type


class Olmo2(Family):
    model_type = "olmo2"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return base_config(entries, has_pre_norm=False, has_post_norm=True, qk_norm="all")


class Olmo3(Family):
    """Three of four layers slide. The scaling of rotations is for the layers that see everything."""

    model_type = "olmo3"

    def read_config(self, entries: Entries) -> DecoderConfig:
        theta = float(entries.get("rope_theta") or 5e5)
        entries = with_ropes_by_type(entries, theta=theta, local_theta=theta)
        types = layer_types(entries, usual_pattern=4)
        return base_config(
            entries,
            has_pre_norm=False,
            has_post_norm=True,
            qk_norm="all",
            windows=typed_windows(entries, types),
            layer_types=types,
        )
