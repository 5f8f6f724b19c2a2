"""What a generation_config.json asks for, and which of it ds4q applies.

Applied are ``temperature``, ``top_p``, ``eos_token_id`` and ``do_sample``: as transformers reads
it, ``do_sample: false`` is greedy decoding whatever the temperature is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

from ds4q.quantize.errors import ConfigError

_APPLIED = ("temperature", "top_p", "do_sample", "eos_token_id")
# Of how another tool runs a model, not of which tokens it chooses.
_ELSEWHERE = (
    "_from_model_config",
    "assistant_confidence_threshold",
    "bos_token_id",
    "cache_implementation",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
)
# Values with which a setting changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "frequency_penalty": (0,),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "presence_penalty": (0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "typical_p": (1,),
}


def sampling(
    generation: Mapping[str, Any],
    path: object,
    prefix: str = "",
    *,
    given: Collection[str] = (),
) -> dict[str, float]:
    """``temperature`` and ``top_p`` of a generation_config.json; 1.0 where it has none.

    ``do_sample: false`` is temperature 0.

    Parameters
    ----------
    path, prefix : the file, and what stands before a key; named in errors
    given : keys that the user sets, whose values in the file do not count

    Raises
    ------
    ConfigError : a value that no sampler takes
    """
    found: dict[str, float] = {}
    for key, expected, least, most in (
        ("temperature", "a number from 0 on", 0, sys.float_info.max),
        ("top_p", "a number above 0, at most 1", math.ulp(0), 1),
    ):
        value = None if key in given else generation.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and least <= value <= most):
            raise ConfigError(prefix + key, path=path, expected=expected, found=repr(value)[:80])
        found[key] = 1.0 if value is None else float(value)
    sampled = None if "temperature" in given else generation.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ConfigError(
            prefix + "do_sample", path=path, expected="true or false", found=repr(sampled)[:80]
        )
    if sampled is False:
        found["temperature"] = 0.0
    return found


def not_applied(generation: Mapping[str, Any]) -> list[str]:
    """Each setting that would change answers and is not applied, as ``top_k 50``; by name."""
    found = []
    for key in sorted(generation.keys() - {*_APPLIED, *_ELSEWHERE}):
        value = generation[key]
        if value in (None, [], {}) or value in _NEUTRAL.get(key, ()):
            continue
        found.append(f"{key} {value!r}"[:80])
    return found


def note(generation: Mapping[str, Any]) -> list[str]:
    """One line that names what is not applied, or none."""
    found = not_applied(generation)
    return [f"generation_config settings are not applied: {', '.join(found)}"] if found else []
