"""Owns which tensors a model has on the device, and what each is for. No arithmetic, no launches.

Names, shapes and refusals are those of ``runtime/model``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.layout import Place
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.device.weights import DeviceSource, Matrix
from ds4q.runtime.errors import DeviceModelError
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.resident import check_gate_and_up
from ds4q.runtime.kv import overlap


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """One hyper-connection and the norm that it feeds; ``hc_head`` alike."""

    fn: Place
    base: Place
    scale: Place
    norm: Place


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """``*.compressor.*``; ``columns`` of a raw row."""

    values: Matrix
    gates: Matrix
    ape: Place
    norm: Place
    columns: int


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """``*.indexer.*`` of a ratio-4 layer."""

    query: Matrix
    weights: Matrix
    compressor: CompressorWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``bias`` is None on hash layers, ``by_token`` on all others."""

    ratio: int
    around_attention: HyperWeights
    sink: Place
    query_low: Matrix
    query_norm: Place
    query: Matrix
    kv: Matrix
    kv_norm: Place
    out_low: list[Matrix]
    out: Matrix
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    around_experts: HyperWeights
    gate: Matrix
    bias: Place | None
    by_token: Place | None
    shared: list[Matrix]  # gate, up, down
    experts: list[list[Matrix]]  # by id: gate, up, down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of it."""

    embedding: Matrix
    layers: list[LayerWeights]
    around_head: HyperWeights
    head: Matrix


Slots = tuple[Catalogue, ExpertPools]


def plan_weights(
    config: ModelConfig, source: DeviceSource, path: object, slots: Slots | None = None
) -> ModelWeights:
    """Ask ``source`` for every tensor of the model; refuses what is missing or does not fit.

    With ``slots`` the routed experts are those of the catalogue, and lie in the pools if anywhere.
    """
    _check_sizes(config, path)
    c, flat = config, config.hc_mult * config.hidden_size
    return ModelWeights(
        source.matrix("embed.weight", c.vocab_size, c.hidden_size),
        [_layer(c, source, layer, path, slots) for layer in range(c.num_hidden_layers)],
        HyperWeights(
            source.values("hc_head_fn", c.hc_mult, flat),
            source.values("hc_head_base", c.hc_mult),
            source.values("hc_head_scale", 1),
            source.values("norm.weight", c.hidden_size),
        ),
        source.matrix("head.weight", c.vocab_size, c.hidden_size),
    )


def plan_layer(config: ModelConfig, source: DeviceSource, path: object) -> LayerWeights:
    """``plan_weights`` of a model that is one layer, without embedding and head."""
    _check_sizes(config, path)
    return _layer(config, source, 0, path, None)


def by_token_name(layer: int) -> str:
    """The tensor that tells a hash layer's experts by token id."""
    return f"layers.{layer}.ffn.gate.tid2eid"


def bias_name(layer: int) -> str:
    """The tensor that steers the choice of a learned layer's experts."""
    return f"layers.{layer}.ffn.gate.bias"


def _layer(
    c: ModelConfig, source: DeviceSource, layer: int, path: object, slots: Slots | None
) -> LayerWeights:
    number = c.number(layer)
    name = f"layers.{number}"
    attn, ffn = f"{name}.attn", f"{name}.ffn"
    ratio, heads, width, d = (
        c.compress_ratios[layer],
        c.num_attention_heads,
        c.head_dim,
        c.hidden_size,
    )
    ranks, grouped = c.o_groups * c.o_lora_rank, heads * width // c.o_groups
    hashed = c.is_hash_layer(layer)
    return LayerWeights(
        ratio,
        _hyper(c, source, f"{name}.hc_attn", f"{name}.attn_norm.weight"),
        source.values(f"{attn}.attn_sink", heads),
        source.matrix(f"{attn}.wq_a.weight", c.q_lora_rank, d),
        source.values(f"{attn}.q_norm.weight", c.q_lora_rank),
        source.matrix(f"{attn}.wq_b.weight", heads * width, c.q_lora_rank),
        source.matrix(f"{attn}.wkv.weight", width, d),
        source.values(f"{attn}.kv_norm.weight", width),
        source.row_groups(f"{attn}.wo_a.weight", ranks, grouped, c.o_groups),
        source.matrix(f"{attn}.wo_b.weight", d, ranks),
        _compressor(c, source, f"{attn}.compressor", ratio, width) if ratio else None,
        _indexer(c, source, f"{attn}.indexer", ratio) if ratio == 4 else None,
        _hyper(c, source, f"{name}.hc_ffn", f"{name}.ffn_norm.weight"),
        source.matrix(f"{ffn}.gate.weight", c.n_routed_experts, d),
        None if hashed else source.values(bias_name(number), c.n_routed_experts),
        source.ids(
            by_token_name(number), c.vocab_size, c.num_experts_per_tok, below=c.n_routed_experts
        )
        if hashed
        else None,
        _shared(c, source, f"{ffn}.shared_experts", path),
        _experts(c, source, number, path) if slots is None else _pooled(source, layer, *slots),
    )


def _hyper(c: ModelConfig, source: DeviceSource, name: str, norm: str) -> HyperWeights:
    rows = (2 + c.hc_mult) * c.hc_mult
    return HyperWeights(
        source.values(f"{name}_fn", rows, c.hc_mult * c.hidden_size),
        source.values(f"{name}_base", rows),
        source.values(f"{name}_scale", 3),
        source.values(norm, c.hidden_size),
    )


def _compressor(
    c: ModelConfig, source: DeviceSource, name: str, ratio: int, width: int
) -> CompressorWeights:
    columns = overlap(ratio) * width
    return CompressorWeights(
        source.matrix(f"{name}.wkv.weight", columns, c.hidden_size),
        source.matrix(f"{name}.wgate.weight", columns, c.hidden_size),
        source.values(f"{name}.ape", ratio, columns),
        source.values(f"{name}.norm.weight", width),
        columns,
    )


def _indexer(c: ModelConfig, source: DeviceSource, name: str, ratio: int) -> IndexerWeights:
    heads, width = c.index_n_heads, c.index_head_dim
    return IndexerWeights(
        source.matrix(f"{name}.wq_b.weight", heads * width, c.q_lora_rank),
        source.matrix(f"{name}.weights_proj.weight", heads, c.hidden_size),
        _compressor(c, source, f"{name}.compressor", ratio, width),
    )


def _experts(c: ModelConfig, source: DeviceSource, layer: int, path: object) -> list[list[Matrix]]:
    """By id: gate, up, down. One buffer holds gate and up in turn, another the downs."""
    d, width = c.hidden_size, c.moe_intermediate_size
    names = [f"layers.{layer}.ffn.experts.{e}" for e in range(c.n_routed_experts)]
    downs = source.stacked(
        f"layers.{layer} down", [(f"{name}.w2.weight", (d, width)) for name in names]
    )
    pairs = source.stacked(
        f"layers.{layer} gate and up",
        [(f"{name}.{w}.weight", (width, d)) for name in names for w in ("w1", "w3")],
    )
    for name, gate, up in zip(names, pairs[::2], pairs[1::2], strict=True):
        check_gate_and_up(name, gate.entry.type_id, up.entry.type_id, path)
    return [list(parts) for parts in zip(pairs[::2], pairs[1::2], downs, strict=True)]


def _pooled(
    source: DeviceSource, layer: int, catalogue: Catalogue, pools: ExpertPools
) -> list[list[Matrix]]:
    """By id: gate, up, down, all said to be in the layer's first slot."""
    bases = pools.bases(layer)
    return [
        [source.pooled(entry, base) for entry, base in zip(record.entries, bases, strict=True)]
        for record in catalogue.packed[layer]
    ]


def _shared(c: ModelConfig, source: DeviceSource, name: str, path: object) -> list[Matrix]:
    """Gate, up, down of the expert that every token uses."""
    d, width = c.hidden_size, c.moe_intermediate_size
    gate = source.matrix(f"{name}.w1.weight", width, d)
    up = source.matrix(f"{name}.w3.weight", width, d)
    check_gate_and_up(name, gate.entry.type_id, up.entry.type_id, path)
    return [gate, up, source.matrix(f"{name}.w2.weight", d, width)]


def _check_sizes(c: ModelConfig, path: object) -> None:
    """What the kernels' shared memory and loads are laid out for."""

    def check(key: str, holds: bool, expected: str) -> None:
        if not holds:
            found = repr(getattr(c, key))
            raise DeviceModelError(f"config key {key}", path=path, expected=expected, found=found)

    check("hc_mult", c.hc_mult <= 5, "at most 5")
    check("hidden_size", c.hidden_size <= 8192 and c.hidden_size % 32 == 0, "32, 64, .. 8192")
    check("head_dim", c.head_dim <= 512 and c.head_dim % 4 == 0, "4, 8, .. 512")
    check("index_head_dim", c.index_head_dim <= 128 and c.index_head_dim % 4 == 0, "4, 8, .. 128")
    check("index_n_heads", c.index_n_heads <= 64, "at most 64")
    check("n_routed_experts", c.n_routed_experts <= 1024, "at most 1024")
    check("num_experts_per_tok", c.num_experts_per_tok <= 31, "at most 31")
