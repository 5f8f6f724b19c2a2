"""Owns DeepSeek-V4's tensor names: what each is, its shape, which of them a config implies.

Opens no file and judges no config. Source: tensor lists and inference code of
huggingface.co/deepseek-ai/DeepSeek-V4-Flash. All sizes come from the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NoReturn

from ds4q.quantize.config import Dims, has_dspark_keys
from ds4q.quantize.errors import ConfigError, UnexpectedTensorError, UnsupportedModelError

Draft = Literal["dspark", "mtp"]
Part = Literal["trunk", "dspark", "mtp"]

MAX_TENSORS = 1 << 24  # of an inventory; a config that implies more is not believed
INDEXED_RATIO = 4
# .weight_scale_inv is the older spelling; both multiply.
SCALE_SUFFIXES = (".scale", ".weight_scale_inv")


class Role(StrEnum):
    """What a tensor does; recipes choose types by role."""

    EMBED = "embed"
    HEAD = "head"
    NORM = "norm"
    HYPER = "hyper"  # hc_*: mixing of the residual streams
    ATTENTION = "attention"  # wq_a, wq_b, wkv, wo_a, wo_b
    SINK = "sink"
    COMPRESSOR = "compressor"  # wkv, wgate, of the attention's and of the indexer's compressor
    POSITION = "position"  # ape of a compressor
    INDEXER = "indexer"  # wq_b, weights_proj
    GATE = "gate"
    GATE_BIAS = "gate-bias"
    HASH_TABLE = "hash-table"  # tid2eid
    EXPERT = "expert"
    SHARED_EXPERT = "shared-expert"
    DRAFT_PROJECTION = "draft-projection"  # main_proj, e_proj, h_proj
    MARKOV = "markov"
    CONFIDENCE = "confidence"


class Storage(StrEnum):
    """How the release stores a tensor."""

    FP4 = "fp4"
    FP8 = "fp8"
    BF16 = "bf16"
    F32 = "f32"
    INTEGER = "integer"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a name says. ``layer`` of a draft tensor is its stage.

    ``logical_shape`` (out, in) counts elements, not bytes.
    """

    name: str
    role: Role
    layer: int | None
    expert: int | None
    projection: str | None
    part: Part
    logical_shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """What a config implies for one weight; None in ``shape`` where a partial config is silent."""

    storage: Storage
    shape: tuple[int | None, ...]


# What a kind of layer must have for a row below to apply to it.
_ALWAYS, _COMPRESSED, _INDEXED, _LEARNED, _HASHED = range(5)


@dataclass(frozen=True, slots=True)
class _Row:
    role: Role
    storage: Storage
    dims: tuple[str, ...]  # keys of Dims.sizes, or the layer's "ratio" and "comp"
    when: int = _ALWAYS


def _row(role: Role, storage: Storage, dims: str, when: int = _ALWAYS) -> _Row:
    return _Row(role, storage, tuple(dims.split()), when)


_HC_HEAD = {
    "hc_head_fn": _row(Role.HYPER, Storage.F32, "n n*d"),
    "hc_head_base": _row(Role.HYPER, Storage.F32, "n"),
    "hc_head_scale": _row(Role.HYPER, Storage.F32, "1"),
}

# d hidden, V vocabulary, H heads, D head size, n streams, E experts, K per token, I their width,
# G output groups, q and o low ranks, x index heads of size y; comp = D, or 2 D at ratio 4.
TRUNK_ROWS = {
    "embed.weight": _row(Role.EMBED, Storage.BF16, "V d"),
    "head.weight": _row(Role.HEAD, Storage.BF16, "V d"),
    "norm.weight": _row(Role.NORM, Storage.BF16, "d"),
    **_HC_HEAD,
}

LAYER_ROWS = {
    "attn_norm.weight": _row(Role.NORM, Storage.BF16, "d"),
    "ffn_norm.weight": _row(Role.NORM, Storage.BF16, "d"),
    "hc_attn_fn": _row(Role.HYPER, Storage.F32, "(2+n)*n n*d"),
    "hc_attn_base": _row(Role.HYPER, Storage.F32, "(2+n)*n"),
    "hc_attn_scale": _row(Role.HYPER, Storage.F32, "3"),
    "hc_ffn_fn": _row(Role.HYPER, Storage.F32, "(2+n)*n n*d"),
    "hc_ffn_base": _row(Role.HYPER, Storage.F32, "(2+n)*n"),
    "hc_ffn_scale": _row(Role.HYPER, Storage.F32, "3"),
    "attn.attn_sink": _row(Role.SINK, Storage.F32, "H"),
    "attn.wq_a.weight": _row(Role.ATTENTION, Storage.FP8, "q d"),
    "attn.q_norm.weight": _row(Role.NORM, Storage.BF16, "q"),
    "attn.wq_b.weight": _row(Role.ATTENTION, Storage.FP8, "H*D q"),
    "attn.wkv.weight": _row(Role.ATTENTION, Storage.FP8, "D d"),
    "attn.kv_norm.weight": _row(Role.NORM, Storage.BF16, "D"),
    "attn.wo_a.weight": _row(Role.ATTENTION, Storage.FP8, "G*o H*D/G"),
    "attn.wo_b.weight": _row(Role.ATTENTION, Storage.FP8, "d G*o"),
    "attn.compressor.wkv.weight": _row(Role.COMPRESSOR, Storage.BF16, "comp d", _COMPRESSED),
    "attn.compressor.wgate.weight": _row(Role.COMPRESSOR, Storage.BF16, "comp d", _COMPRESSED),
    "attn.compressor.ape": _row(Role.POSITION, Storage.F32, "ratio comp", _COMPRESSED),
    "attn.compressor.norm.weight": _row(Role.NORM, Storage.BF16, "D", _COMPRESSED),
    "attn.indexer.wq_b.weight": _row(Role.INDEXER, Storage.FP8, "x*y q", _INDEXED),
    "attn.indexer.weights_proj.weight": _row(Role.INDEXER, Storage.BF16, "x d", _INDEXED),
    "attn.indexer.compressor.wkv.weight": _row(Role.COMPRESSOR, Storage.BF16, "2*y d", _INDEXED),
    "attn.indexer.compressor.wgate.weight": _row(Role.COMPRESSOR, Storage.BF16, "2*y d", _INDEXED),
    "attn.indexer.compressor.ape": _row(Role.POSITION, Storage.F32, "ratio 2*y", _INDEXED),
    "attn.indexer.compressor.norm.weight": _row(Role.NORM, Storage.BF16, "y", _INDEXED),
    "ffn.gate.weight": _row(Role.GATE, Storage.BF16, "E d"),
    "ffn.gate.bias": _row(Role.GATE_BIAS, Storage.F32, "E", _LEARNED),
    "ffn.gate.tid2eid": _row(Role.HASH_TABLE, Storage.INTEGER, "V K", _HASHED),
    "ffn.shared_experts.w1.weight": _row(Role.SHARED_EXPERT, Storage.FP8, "I d"),
    "ffn.shared_experts.w2.weight": _row(Role.SHARED_EXPERT, Storage.FP8, "d I"),
    "ffn.shared_experts.w3.weight": _row(Role.SHARED_EXPERT, Storage.FP8, "I d"),
}

EXPERT_ROWS = {
    "w1.weight": _row(Role.EXPERT, Storage.FP4, "I d"),
    "w2.weight": _row(Role.EXPERT, Storage.FP4, "d I"),
    "w3.weight": _row(Role.EXPERT, Storage.FP4, "I d"),
}

DSPARK_FIRST_ROWS = {
    "main_proj.weight": _row(Role.DRAFT_PROJECTION, Storage.FP8, "d targets*d"),
    "main_norm.weight": _row(Role.NORM, Storage.BF16, "d"),
}
DSPARK_LAST_ROWS = {
    "norm.weight": _row(Role.NORM, Storage.BF16, "d"),
    **_HC_HEAD,
    "markov_head.markov_w1.weight": _row(Role.MARKOV, Storage.BF16, "V rank"),
    "markov_head.markov_w2.weight": _row(Role.MARKOV, Storage.BF16, "V rank"),
    "confidence_head.proj.weight": _row(Role.CONFIDENCE, Storage.BF16, "1 d+rank"),
}
MTP_ROWS = {
    "e_proj.weight": _row(Role.DRAFT_PROJECTION, Storage.FP8, "d d"),
    "h_proj.weight": _row(Role.DRAFT_PROJECTION, Storage.FP8, "d d"),
    "enorm.weight": _row(Role.NORM, Storage.BF16, "d"),
    "hnorm.weight": _row(Role.NORM, Storage.BF16, "d"),
    "norm.weight": _row(Role.NORM, Storage.BF16, "d"),
    **_HC_HEAD,
}
_STAGE_ROWS = DSPARK_FIRST_ROWS | DSPARK_LAST_ROWS | MTP_ROWS
_DSPARK_ONLY = (DSPARK_FIRST_ROWS | DSPARK_LAST_ROWS).keys() - MTP_ROWS.keys()
_MTP_ONLY = MTP_ROWS.keys() - DSPARK_FIRST_ROWS.keys() - DSPARK_LAST_ROWS.keys()

_NUMBER = r"(0|[1-9][0-9]{0,5})"
_BLOCK = re.compile(rf"(layers|mtp)\.{_NUMBER}\.(?:ffn\.experts\.{_NUMBER}\.(w[123])\.weight|(.+))")
_STAGE = re.compile(rf"mtp\.{_NUMBER}\.")

_FOREIGN = [
    (
        re.compile(r"engram|markov_head\.(embed|head)\b"),
        "a tensor of DeepSeek-V4.1, which is another architecture",
        "use a deepseek_v4 checkpoint",
    ),
    (
        re.compile(r"(^|\.)(mlp|self_attn|attn_hc|ffn_hc)\.|embed_tokens|lm_head|_layernorm\."),
        "tensor names as transformers saves them (experts stacked in gate_up_proj and down_proj)",
        "use the checkpoint as DeepSeek publishes it, with one layers.N.ffn.experts.E.w1.weight "
        "per expert",
    ),
]


@dataclass(frozen=True, slots=True)
class _Place:
    """A known name taken apart."""

    row: _Row
    block: str | None  # "layers", "mtp", or None for the top level
    number: int | None
    expert: int | None
    rest: str


def _place(name: str) -> _Place | None:
    if name in TRUNK_ROWS:
        return _Place(TRUNK_ROWS[name], None, None, None, name)
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    block, number, expert, projection, rest = match.groups()
    if expert is not None:
        rest = f"{projection}.weight"
        return _Place(EXPERT_ROWS[rest], block, int(number), int(expert), rest)
    row = LAYER_ROWS.get(rest)
    if row is None and block == "mtp":
        row = _STAGE_ROWS.get(rest)
    return None if row is None else _Place(row, block, int(number), None, rest)


def classify(
    name: str, draft: Draft | None = None, logical_shape: tuple[int, ...] = ()
) -> TensorInfo | None:
    """What a weight's name (without ``model.``) says; None for a name that is not known.

    A scale is no tensor of its own here: see :func:`weight_of_scale`. Names alone do not tell
    which draft ``mtp.*`` belongs to, so the ``part`` of those is ``draft``, or "mtp".
    """
    place = _place(name)
    if place is None:
        return None
    projection = None
    if place.row.role in (Role.EXPERT, Role.SHARED_EXPERT):
        projection = place.rest.removesuffix(".weight")[-2:]
    part: Part = "trunk" if place.block != "mtp" else draft or "mtp"
    return TensorInfo(
        name, place.row.role, place.number, place.expert, projection, part, logical_shape
    )


def weight_of_scale(name: str) -> str | None:
    """The weight that ``name`` is the scale of; None where it is not a scale's name."""
    for suffix in SCALE_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + ".weight"
    return None


def refuse_foreign(name: str, path: object) -> None:
    """Raise for a name that belongs to another format or architecture, saying which."""
    for pattern, what, remedy in _FOREIGN:
        if pattern.search(name):
            raise UnsupportedModelError(what, path=path, tensor=name, remedy=remedy)


def find_draft(
    names: Iterable[str], config: dict[str, Any], path: object = None
) -> tuple[Draft | None, int]:
    """Kind and number of draft stages, counted in the names: the config says 1 for three stages.

    Raises
    ------
    UnexpectedTensorError : tensors of both kinds
    """
    stages, kinds = 0, {}
    for name in names:
        match = _STAGE.match(name)
        if match:
            stages = max(stages, int(match.group(1)) + 1)
            rest = name[match.end() :]
            if rest in _DSPARK_ONLY:
                kinds["dspark"] = name
            elif rest in _MTP_ONLY:
                kinds["mtp"] = name
    if len(kinds) == 2:
        raise UnexpectedTensorError(
            "draft mixes plain MTP and DSpark",
            path=path,
            tensor=kinds["mtp"],
            found=kinds["dspark"],
        )
    if not stages:
        return None, 0
    if kinds:
        return ("dspark" if "dspark" in kinds else "mtp"), stages
    return ("dspark" if has_dspark_keys(config) else "mtp"), stages


class Inventory:
    """What a config implies: which weights must be there, and what each must look like.

    Parameters
    ----------
    dims : sizes of the config; where they are None (partial config), nothing is required
    draft, stages : from :func:`find_draft`
    """

    def __init__(self, dims: Dims, draft: Draft | None = None, stages: int = 0) -> None:
        self.dims = dims
        self.draft: Draft | None = draft
        self.stages = stages
        blocks = (dims.layers or 0) + stages
        implied = blocks * (len(LAYER_ROWS) + len(EXPERT_ROWS) * (dims.experts or 0))
        if implied > MAX_TENSORS:
            raise ConfigError(
                "num_hidden_layers and n_routed_experts imply too many tensors",
                expected=f"at most {MAX_TENSORS}",
                found=implied,
            )
        self._experts = {
            rest: Expected(row.storage, self._shape(row, None)) for rest, row in EXPERT_ROWS.items()
        }
        self._blocks: dict[tuple[str, int], dict[str, tuple[Expected, bool | None]]] = {}

    def expected(self, name: str, path: object = None) -> Expected:
        """Storage and shape of a known weight; ``path`` is for the message.

        Raises
        ------
        UnexpectedTensorError : the name is not known, or the config rules it out, saying why
        """
        place = _place(name)
        if place is None:
            raise UnexpectedTensorError(path=path, tensor=name)
        if place.block is None or place.number is None:
            return Expected(place.row.storage, self._shape(place.row, None))
        trunk = place.block == "layers"
        count = self.dims.layers if trunk else self.stages
        if count is not None and place.number >= count:
            self._refuse(name, path, f"the config has {count} {'layers' if trunk else 'stages'}")
        if place.expert is not None:
            experts = self.dims.experts
            if experts is not None and place.expert >= experts:
                self._refuse(name, path, f"the config has {experts} experts")
            return self._experts[place.rest]
        expected, applies = self._block(place.block, place.number)[place.rest]
        if applies is False:
            self._refuse(name, path, self._why_not(place))
        return expected

    def required(self) -> Iterator[str]:
        """Names of all weights that must be there, scales not counted."""
        if self.dims.layers is not None:
            yield from TRUNK_ROWS
        blocks = [("layers", n) for n in range(self.dims.layers or 0)]
        for block, number in blocks + [("mtp", n) for n in range(self.stages)]:
            for rest, (_, applies) in self._block(block, number).items():
                if applies:
                    yield f"{block}.{number}.{rest}"
            for expert in range(self.dims.experts or 0):
                for rest in EXPERT_ROWS:
                    yield f"{block}.{number}.ffn.experts.{expert}.{rest}"

    def _block(self, block: str, number: int) -> dict[str, tuple[Expected, bool | None]]:
        """Rows of one layer or stage; None in the second place where the config is silent."""
        key = block, number
        if key not in self._blocks:
            ratio = self._ratio(block, number)
            rows = LAYER_ROWS if block == "layers" else LAYER_ROWS | _STAGE_ROWS
            self._blocks[key] = {
                rest: (
                    Expected(row.storage, self._shape(row, ratio)),
                    self._applies(row, block, number, rest),
                )
                for rest, row in rows.items()
            }
        return self._blocks[key]

    def _ratio(self, block: str, number: int) -> int | None:
        if block == "mtp":
            return 0
        return None if self.dims.ratios is None else self.dims.ratios[number]

    def _applies(self, row: _Row, block: str, number: int, rest: str) -> bool | None:
        if block == "mtp" and rest not in LAYER_ROWS:
            if self.draft == "mtp":
                return rest in MTP_ROWS
            first, last = number == 0, number == self.stages - 1
            return (first and rest in DSPARK_FIRST_ROWS) or (last and rest in DSPARK_LAST_ROWS)
        ratio = self._ratio(block, number)
        if row.when == _COMPRESSED:
            return None if ratio is None else ratio > 0
        if row.when == _INDEXED:
            return None if ratio is None else ratio == INDEXED_RATIO
        if row.when in (_LEARNED, _HASHED):
            hash_layers = 0 if block == "mtp" else self.dims.hash_layers
            if hash_layers is None:
                return None
            return (number < hash_layers) == (row.when == _HASHED)
        return True

    def _shape(self, row: _Row, ratio: int | None) -> tuple[int | None, ...]:
        return tuple(self._size(dim, ratio) for dim in row.dims)

    def _size(self, dim: str, ratio: int | None) -> int | None:
        if dim == "ratio":
            return ratio
        if dim == "comp":
            head = self.dims.sizes["D"]
            overlap = 2 if ratio == INDEXED_RATIO else 1
            return None if head is None or ratio is None else overlap * head
        return self.dims.sizes[dim]

    def _why_not(self, place: _Place) -> str:
        if place.row.when in (_COMPRESSED, _INDEXED):
            return f"its compress ratio is {self._ratio(place.block or '', place.number or 0)}"
        if place.row.when in (_LEARNED, _HASHED):
            kind = "token hash" if place.row.when == _LEARNED else "learned scores"
            return f"this layer routes by {kind}"
        return f"not a tensor of stage {place.number} of a {self.draft} draft of {self.stages}"

    @staticmethod
    def _refuse(name: str, path: object, why: str) -> NoReturn:
        raise UnexpectedTensorError(
            f"the config rules this tensor out: {why}", path=path, tensor=name
        )
