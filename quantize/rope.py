"""The spellings of rotary positions in a config.json, read as one.

DeepSeek writes ``rope_scaling`` with ``type`` beside ``rope_theta`` and ``compress_rope_theta``;
transformers says ``rope_type``, and from version 5 on ``rope_parameters``, which hold the bases,
too. Where several are there they must agree: which one a tool believes is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds4q.quantize.errors import ConfigError, UnsupportedModelError

BASES = ("rope_theta", "compress_rope_theta")
YARN_KEYS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
# Further keys change the arithmetic unless they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None, 1),
    "mscale": (None, 0),
    "mscale_all_dim": (None, 0),
    "truncate": (None, True),
}
_PARTS = {"main": "rope_theta", "compress": "compress_rope_theta"}  # the base of each


def read_rope(config: Mapping[str, Any], path: object) -> tuple[dict[str, Any], list[str]]:
    """Bases and YaRN values by their keys, and the keys that are absent.

    Values are as the config has them: ``config.py`` holds them to their bounds.

    Raises
    ------
    UnsupportedModelError : scaling other than YaRN, or a key that would change the arithmetic
    ConfigError : two places of the config disagree
    """
    found = _Found(path)
    for key in BASES:
        if key in config:
            found.put(key, key, config[key])
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if parameters is None:
        if "rope_scaling" in config:
            found.block("rope_scaling", scaling, config)
        else:
            found.lacking.append("rope_scaling")
    else:
        if scaling is not None:
            found.block("rope_scaling", scaling, config)
        if isinstance(parameters, dict) and parameters.keys() & _PARTS.keys():
            found.parts(parameters, config)
        else:
            found.block("rope_parameters", parameters, config)
    found.lacking += [key for key in BASES if key not in found.values]
    return found.values, sorted(set(found.lacking))


class _Found:
    """Values as they are met, each with the place that it was met at."""

    def __init__(self, path: object) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.lacking: list[str] = []
        self._places: dict[str, str] = {}

    def put(self, key: str, place: str, value: Any) -> None:
        """Take a value; refuse another than that of an earlier place."""
        if key in self.values and self.values[key] != value:
            raise ConfigError(
                f"{self._places[key]} and {place} disagree",
                path=self.path,
                expected=repr(self.values[key])[:80],
                found=repr(value)[:80],
                remedy="keep the one that the model was trained with",
            )
        self.values.setdefault(key, value)
        self._places.setdefault(key, place)

    def parts(self, parameters: dict[str, Any], config: Mapping[str, Any]) -> None:
        """``rope_parameters`` by kind of layer, as transformers writes them for this model."""
        for part, given in parameters.items():
            place = f"rope_parameters.{part}"
            if part not in _PARTS:
                raise UnsupportedModelError(
                    place, path=self.path, expected=" and ".join(_PARTS), found=repr(given)[:80]
                )
            if not isinstance(given, dict):
                self._refuse(place, "an object", given)
            if part == "compress":
                self.block(place, given, config, base=_PARTS[part])
                continue
            self._types(place, given, "default")
            self._known(place, given, (_PARTS[part],), config)
            if "rope_theta" in given:
                self.put("rope_theta", f"{place}.rope_theta", given["rope_theta"])
        if "compress" not in parameters and "factor" not in self.values:
            self.lacking.append("rope_parameters.compress")

    def block(
        self, place: str, given: Any, config: Mapping[str, Any], base: str = "rope_theta"
    ) -> None:
        """An object of YaRN's values; ``base`` is what its ``rope_theta`` means."""
        if not isinstance(given, dict):
            self._refuse(place, "yarn", given)
        if not self._types(place, given, "yarn"):
            self.lacking.append(f"{place}.type")
        self._known(place, given, (*YARN_KEYS, *BASES), config)
        for key in (*YARN_KEYS, *BASES):
            if key in given:
                self.put(base if key == "rope_theta" else key, f"{place}.{key}", given[key])
            elif key in YARN_KEYS and key not in self.values:
                self.lacking.append(f"{place}.{key}")

    def _types(self, place: str, given: dict[str, Any], expected: str) -> bool:
        named = [key for key in ("type", "rope_type") if key in given]
        for key in named:
            if given[key] != expected:
                self._refuse(f"{place}.{key}", repr(expected), given[key])
        return bool(named)

    def _known(
        self, place: str, given: dict[str, Any], known: tuple[str, ...], config: Mapping[str, Any]
    ) -> None:
        """Refuse keys whose meaning is not known, or is another arithmetic."""
        for key, value in given.items():
            if key in (*known, "type", "rope_type"):
                continue
            if key == "partial_rotary_factor":
                rotated, width = config.get("qk_rope_head_dim"), config.get("head_dim")
                if type(rotated) is int and type(width) is int and width > 0:
                    if value != rotated / width:
                        expected = f"qk_rope_head_dim / head_dim = {rotated / width}"
                        self._refuse(f"{place}.{key}", expected, value)
                    continue
            neutral = _NEUTRAL.get(key, (None,))
            if isinstance(value, bool) != isinstance(neutral[-1], bool) or value not in neutral:
                if value is None:
                    continue
                expected = (
                    "no such key" if key not in _NEUTRAL else f"{neutral[-1]}, or no such key"
                )
                self._refuse(f"{place}.{key}", expected, value)

    def _refuse(self, what: str, expected: str, found: Any) -> None:
        raise UnsupportedModelError(what, path=self.path, expected=expected, found=repr(found)[:80])
