"""Owns the constants of the forward pass, as a DeepSeek-V4 ``config.json`` names them.

What every config must say is checked by ``quantize/config.py``; only what the forward pass demands
beyond that is checked here. Source of keys and meanings: the config and inference code that
DeepSeek publishes with DeepSeek-V4-Flash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds4q.quantize.config import check_config
from ds4q.quantize.errors import SourceError
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
    bos_token_id: int
    eos_token_id: int
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
        check_config(dict(config), path)
    except SourceError as error:
        raise ConfigError(
            error.what, path=path, expected=error.expected, found=error.found
        ) from error
    values = {name: config[name] for name in ModelConfig.__annotations__ if name != "run_layers"}
    scaling = {name: config["rope_scaling"][name] for name in Yarn.__annotations__}
    values["rope_scaling"] = Yarn(**scaling)
    # Entries past the hidden layers belong to draft stages.
    values["compress_ratios"] = tuple(config["compress_ratios"][: config["num_hidden_layers"]])
    parsed = ModelConfig(**values)
    _check_relations(parsed, path)
    return parsed


def _check_relations(c: ModelConfig, path: object) -> None:
    """What only the forward pass demands."""

    def check(key: str, holds: bool, expected: str) -> None:
        if not holds:
            found = repr(getattr(c, key))
            raise ConfigError(f"config key {key}", path=path, expected=expected, found=found)

    rope, heads = c.qk_rope_head_dim, c.num_attention_heads
    check("qk_rope_head_dim", rope % 2 == 0, "an even number")
    check("head_dim", c.head_dim >= rope, f"at least qk_rope_head_dim {rope}")
    check("index_head_dim", c.index_head_dim >= rope, f"at least qk_rope_head_dim {rope}")
    check("o_groups", heads % c.o_groups == 0, f"a divisor of num_attention_heads {heads}")
    check(
        "num_experts_per_tok",
        c.num_experts_per_tok <= c.n_routed_experts,
        f"at most n_routed_experts {c.n_routed_experts}",
    )
    for key in ("bos_token_id", "eos_token_id"):
        check(key, getattr(c, key) < c.vocab_size, f"below vocab_size {c.vocab_size}")
    for key in ("rope_theta", "compress_rope_theta"):
        check(key, getattr(c, key) > 1, "more than 1")
