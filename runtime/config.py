"""Owns the constants of the forward pass, as a DeepSeek-V4 ``config.json`` names them.

What a config must say is checked by ``quantize/config.py``, here as everywhere. Source of keys and
meanings: the config and inference code that DeepSeek publishes with DeepSeek-V4-Flash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds4q.artifact.hfq import ARCH_DEEPSEEK4, Reader
from ds4q.quantize.config import check_config
from ds4q.quantize.errors import SourceError
from ds4q.quantize.inventory import first_fault
from ds4q.quantize.rope import BASES
from ds4q.runtime.errors import ConfigError, RunError


@dataclass(frozen=True, slots=True)
class Yarn:
    """The ``rope_scaling`` object."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The constants of the forward pass, named as in config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    hc_mult: int
    hc_sinkhorn_iters: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn
    compress_ratios: tuple[int, ...]  # one per hidden layer
    run_layers: tuple[int, ...] | None = None  # numbers of the layers that run; None: all of them

    def is_hash_layer(self, layer: int) -> bool:
        """Whether the experts of ``layer`` follow from the token id alone."""
        return layer < self.num_hash_layers

    def number(self, layer: int) -> int:
        """The number that ``layer``, counted among those that run, has in the checkpoint."""
        return layer if self.run_layers is None else self.run_layers[layer]

    def shortened(self, layers: Sequence[int] | None) -> ModelConfig:
        """The config of a model of these layers alone, in ascending order; None: of all."""
        if layers is None:
            return self
        found = list(layers)
        if not found or found != sorted(set(found) & set(range(self.num_hidden_layers))):
            raise RunError(
                "layers to run",
                expected=f"ascending numbers from 0 to {self.num_hidden_layers - 1}",
                found=found,
            )
        return replace(
            self,
            num_hidden_layers=len(found),
            num_hash_layers=sum(map(self.is_hash_layer, found)),
            compress_ratios=tuple(self.compress_ratios[layer] for layer in found),
            run_layers=tuple(map(self.number, found)),
        )


def parse_config(config: Mapping[str, Any], *, path: object = None) -> ModelConfig:
    """Check a parsed config.json and return its constants.

    Parameters
    ----------
    config : the object of ``config.json``
    path : named in errors

    Raises
    ------
    ConfigError
        A key is missing, has the wrong type, or its value means other arithmetic.
    """
    try:
        dims = check_config(dict(config), path)
    except SourceError as error:
        raise ConfigError(
            error.what, path=path, expected=error.expected, found=error.found
        ) from error
    names = [name for name in ModelConfig.__annotations__ if name != "run_layers"]
    values: dict[str, Any] = dict(config) | {name: dims.rope[name] for name in BASES}
    yarn: dict[str, Any] = {name: dims.rope[name] for name in Yarn.__annotations__}
    # Entries past the hidden layers belong to draft stages.
    values["compress_ratios"] = tuple(config["compress_ratios"][: config["num_hidden_layers"]])
    values["rope_scaling"] = Yarn(**yarn)
    return ModelConfig(**{name: values[name] for name in names})


def checked_config(reader: Reader) -> ModelConfig:
    """The config of a complete DeepSeek-V4 artifact; ``RunError`` for any other file."""
    if reader.arch_id != ARCH_DEEPSEEK4:
        raise RunError(
            "not a DeepSeek-V4 artifact",
            path=reader.path,
            expected=f"arch id {ARCH_DEEPSEEK4}",
            found=reader.arch_id,
        )
    ours = reader.metadata.get("ds4q")
    if isinstance(ours, dict) and ours.get("partial"):
        raise RunError(
            "the artifact holds only part of a model",
            path=reader.path,
            remedy="quantize the whole checkpoint, without --allow-partial and prefixes",
        )
    if reader.tensors and all(name.startswith("mtp.") for name in reader.tensors):
        raise RunError(
            "this is the draft part of a model",
            path=reader.path,
            remedy="run the artifact that it was written beside",
        )
    config = reader.metadata.get("config")
    if not isinstance(config, dict):
        raise ConfigError("metadata holds no config object", path=reader.path)
    return parse_config(config, path=reader.path)


def check_sound(reader: Reader) -> None:
    """Refuse an artifact whose header, metadata or index ``ds4q verify`` calls wrong."""
    fault = first_fault(reader)
    if fault is not None:
        raise RunError(fault, path=reader.path, remedy="see what ds4q verify says of it")
