"""Owns the audit before any work: names, pairs, dtypes and shapes against what the config implies.

Reads no tensor data but F32 scales; values of codes and scale bytes are judged where they are
packed. A fault raises; what is legal but unusual becomes a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ds4q.quantize.checkpoint import CONFIG, PREFIX, Checkpoint, SourceTensor
from ds4q.quantize.config import (
    MODEL_TYPE,
    Dims,
    check_config,
    check_generation,
    has_dspark_keys,
    require_dspark_keys,
)
from ds4q.quantize.deepseek4 import (
    Draft,
    Expected,
    Inventory,
    Storage,
    TensorInfo,
    classify,
    find_draft,
    refuse_foreign,
    weight_of_scale,
)
from ds4q.quantize.errors import (
    MissingTensorError,
    ScalePairError,
    ScaleValueError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
    UnsupportedModelError,
)
from ds4q.quantize.generation import note

Kind = Literal["fp4", "fp8", "bf16", "f16", "f32", "i64", "i32"]

FP4_BLOCK = 32  # columns that share a scale: OCP MX specification 1.0, MXFP4
FP8_BLOCK = (128, 128)  # where a partial checkpoint has no weight_block_size
EXPERT_SCALE_SUFFIX = ".scale"
NAMES_LISTED = 5
PRO_SHAPE = (61, 7168)  # layers and hidden size of DeepSeek-V4-Pro

_FLOATS: dict[str, Kind] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_INTEGERS: dict[str, Kind] = {"I64": "i64", "I32": "i32"}
_FP8_SCALES = ("F8_E8M0", "U8", "F32")


@dataclass(frozen=True, slots=True)
class Unit:
    """One weight with its scale: what is converted as a whole."""

    weight: SourceTensor
    scale: SourceTensor | None
    info: TensorInfo
    kind: Kind

    @property
    def name(self) -> str:
        """Name of the weight, without ``model.``."""
        return self.weight.name

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """The weight, and its scale where it has one."""
        return (self.weight,) if self.scale is None else (self.weight, self.scale)


@dataclass(frozen=True, slots=True)
class Audit:
    """A sound checkpoint, taken apart.

    Attributes
    ----------
    units : all weights, sorted by name
    missing : weights that the config implies and that are absent; only of a partial checkpoint
    missing_keys : config keys that are absent; only of a partial checkpoint
    extra : tensors that are skipped: integers (I64) of unknown name
    warnings : what is legal but unusual, those of the checkpoint included
    partial : something is absent
    draft, stages : kind and number of draft stages
    dims : sizes of the config
    """

    units: list[Unit]
    missing: list[str]
    missing_keys: list[str]
    extra: list[SourceTensor]
    warnings: list[str]
    partial: bool
    draft: Draft | None
    stages: int
    dims: Dims


def audit(checkpoint: Checkpoint, *, allow_partial: bool = False) -> Audit:
    """Check that ``checkpoint`` is a whole, sound DeepSeek-V4 model; pair weights with scales.

    With ``allow_partial`` tensors and config keys may be absent; what is there must be sound.

    Raises
    ------
    SourceError : the first fault in name order, or all missing tensors in one error
    """
    config_path = checkpoint.folder / CONFIG
    config = checkpoint.config
    if checkpoint.config_raw is None and allow_partial:
        config = {"model_type": MODEL_TYPE}
    dims = check_config(config, config_path, allow_partial=allow_partial)
    generation = checkpoint.texts.generation_config or {}
    check_generation(generation, config, checkpoint.folder / "generation_config.json")
    draft, stages = find_draft(checkpoint.tensors, config, checkpoint.folder)
    infos, scales, extra = _sort_out(checkpoint, draft)
    if draft == "dspark" and not allow_partial:
        require_dspark_keys(config, config_path)
    inventory = Inventory(dims, draft, stages)
    judge = _Judge(checkpoint, inventory)
    units = [
        judge.unit(checkpoint.tensors[name], scales.pop(name, None), info)
        for name, info in infos.items()
    ]
    for name, scale in scales.items():
        path = checkpoint.shards[scale.shard].path
        if classify(name) is None:
            raise UnexpectedTensorError(path=path, tensor=scale.raw_name)
        raise ScalePairError("scale without its weight", path=path, tensor=scale.raw_name)
    missing = [name for name in inventory.required() if name not in infos]
    if missing and not allow_partial:
        listed = missing[1:NAMES_LISTED] + ["..."] * (len(missing) > NAMES_LISTED)
        raise MissingTensorError(
            f"tensor is missing, {len(missing)} in all" + "".join(f", {name}" for name in listed),
            path=checkpoint.folder,
            tensor=missing[0],
        )
    return Audit(
        units=units,
        missing=missing,
        missing_keys=list(dims.lacking),
        extra=extra,
        warnings=checkpoint.warnings
        + judge.warnings()
        + _warnings(extra, config, dims, draft)
        + note(generation),
        partial=bool(missing or dims.lacking),
        draft=draft,
        stages=stages,
        dims=dims,
    )


def _sort_out(
    checkpoint: Checkpoint, draft: Draft | None
) -> tuple[dict[str, TensorInfo], dict[str, SourceTensor], list[SourceTensor]]:
    """Weights by name, scales by their weight's name, and unknown integers, which are skipped."""
    infos: dict[str, TensorInfo] = {}
    scales: dict[str, SourceTensor] = {}
    unknown: list[SourceTensor] = []
    for name, tensor in checkpoint.tensors.items():
        weight = weight_of_scale(name)
        if weight is not None:
            twin = scales.setdefault(weight, tensor)
            if twin is not tensor:
                raise ScalePairError(
                    "two scales for one weight",
                    path=checkpoint.shards[tensor.shard].path,
                    tensor=tensor.raw_name,
                    found=twin.raw_name,
                )
            continue
        info = classify(name, draft, logical_shape(tensor))
        if info is not None:
            infos[name] = info
        else:
            refuse_foreign(name, checkpoint.shards[tensor.shard].path)
            unknown.append(tensor)
    for tensor in unknown:
        if tensor.dtype != "I64":
            path = checkpoint.shards[tensor.shard].path
            raise UnexpectedTensorError(path=path, tensor=tensor.raw_name, found=tensor.dtype)
    _refuse_mixed_prefix(checkpoint)
    return infos, scales, unknown


def logical_shape(tensor: SourceTensor) -> tuple[int, ...]:
    """Shape in elements: an I8 matrix holds two FP4 codes a byte."""
    if tensor.dtype == "I8" and len(tensor.shape) == 2:
        return tensor.shape[0], 2 * tensor.shape[1]
    return tensor.shape


def _refuse_mixed_prefix(checkpoint: Checkpoint) -> None:
    bare = prefixed = None
    for tensor in checkpoint.tensors.values():
        if tensor.raw_name.startswith(PREFIX):
            prefixed = tensor.raw_name
        else:
            bare = tensor.raw_name
    if bare is not None and prefixed is not None:
        raise UnexpectedTensorError(
            f"some names begin with '{PREFIX}', others do not",
            path=checkpoint.folder,
            tensor=prefixed,
            found=bare,
            remedy="use shards of one checkpoint",
        )


class _Judge:
    """Checks weight and scale of one unit against the inventory."""

    def __init__(self, checkpoint: Checkpoint, inventory: Inventory) -> None:
        self.checkpoint = checkpoint
        self.inventory = inventory
        self.fp8_block = inventory.dims.fp8_block or FP8_BLOCK
        self._unusual: dict[tuple[str, str], list[str]] = {}
        self._guessed_block = False

    def unit(self, weight: SourceTensor, scale: SourceTensor | None, info: TensorInfo) -> Unit:
        expected = self.inventory.expected(weight.name, self._path(weight))
        kind = self._kind(weight, expected)
        shape = info.logical_shape
        self._check_shape(weight, shape, expected)
        if kind == "fp4":
            self._check_fp4(weight, shape, scale)
        elif kind == "fp8":
            self._check_fp8(weight, shape, scale)
        elif scale is not None:
            raise ScalePairError(
                f"scale beside a weight that has none in {weight.dtype}",
                path=self._path(scale),
                tensor=scale.raw_name,
            )
        return Unit(weight, scale, info, kind)

    def _path(self, tensor: SourceTensor) -> object:
        return self.checkpoint.shards[tensor.shard].path

    def _kind(self, weight: SourceTensor, expected: Expected) -> Kind:
        """Release dtypes, and plain floats where the release has plain floats or FP8."""
        dtype = weight.dtype
        if expected.storage is Storage.FP4:
            if dtype in ("I8", "F4"):
                return "fp4"
            raise UnsupportedModelError(
                "experts are not packed FP4: nothing to repack",
                path=self._path(weight),
                tensor=weight.raw_name,
                expected="I8 or F4",
                found=dtype,
            )
        kinds: dict[str, Kind] = _FLOATS
        if expected.storage is Storage.FP8:
            kinds = {"F8_E4M3": "fp8", **_FLOATS}
        elif expected.storage is Storage.INTEGER:
            kinds = _INTEGERS
        if dtype not in kinds:
            raise TensorDtypeError(
                path=self._path(weight),
                tensor=weight.raw_name,
                expected=" or ".join(kinds),
                found=dtype,
            )
        kind = kinds[dtype]
        if kind != expected.storage.value and expected.storage is not Storage.INTEGER:
            self._unusual.setdefault((kind, expected.storage), []).append(weight.name)
        return kind

    def warnings(self) -> list[str]:
        """What the units showed that is legal but unusual."""
        found = []
        if self._guessed_block:
            found.append(f"no weight_block_size: FP8 scale grids were checked against {FP8_BLOCK}")
        for (kind, published), names in sorted(self._unusual.items()):
            found.append(
                f"{len(names)} tensors are {kind} where the release has {published}, "
                f"{names[0]} for one"
            )
        return found

    def _check_shape(
        self, weight: SourceTensor, shape: tuple[int, ...], expected: Expected
    ) -> None:
        pairs = zip(expected.shape, shape, strict=False)
        agree = len(shape) == len(expected.shape) and all(e in (None, n) for e, n in pairs)
        if not agree or 0 in shape:
            want = ", ".join("any" if n is None else str(n) for n in expected.shape)
            raise TensorShapeError(
                path=self._path(weight),
                tensor=weight.raw_name,
                expected=f"[{want}]",
                found=f"{list(shape)} ({weight.dtype} {list(weight.shape)})",
            )

    def _check_fp4(
        self, weight: SourceTensor, shape: tuple[int, ...], scale: SourceTensor | None
    ) -> None:
        rows, cols = shape
        if cols % FP4_BLOCK:
            raise TensorShapeError(
                f"row length is not a multiple of {FP4_BLOCK}",
                path=self._path(weight),
                tensor=weight.raw_name,
                found=cols,
                remedy="HFP4G32 cannot hold such a tensor",
            )
        scale = self._scale(weight, scale, ("F8_E8M0",), (rows, cols // FP4_BLOCK))
        if not scale.name.endswith(EXPERT_SCALE_SUFFIX):
            raise ScalePairError(
                "scale of an expert must be named .scale",
                path=self._path(scale),
                tensor=scale.raw_name,
            )

    def _check_fp8(
        self, weight: SourceTensor, shape: tuple[int, ...], scale: SourceTensor | None
    ) -> None:
        rows, cols = shape
        high, wide = self.fp8_block
        self._guessed_block |= self.inventory.dims.fp8_block is None
        # The last block of a row or column may be cut short, none before it.
        grid = (-(-rows // high), -(-cols // wide))
        scale = self._scale(weight, scale, _FP8_SCALES, grid)
        if scale.dtype == "F32":
            self._check_f32_scale(scale)

    def _scale(
        self,
        weight: SourceTensor,
        scale: SourceTensor | None,
        dtypes: tuple[str, ...],
        grid: tuple[int, int],
    ) -> SourceTensor:
        if scale is None:
            raise ScalePairError(
                f"{weight.dtype} weight without its scale",
                path=self._path(weight),
                tensor=weight.raw_name,
            )
        if scale.dtype not in dtypes:
            raise TensorDtypeError(
                path=self._path(scale),
                tensor=scale.raw_name,
                expected=" or ".join(dtypes),
                found=scale.dtype,
            )
        if scale.shape != grid:
            raise TensorShapeError(
                "scale grid does not fit its weight",
                path=self._path(scale),
                tensor=scale.raw_name,
                expected=list(grid),
                found=list(scale.shape),
                remedy="a transposed or other grid cannot be repaired by a reshape",
            )
        return scale

    def _check_f32_scale(self, scale: SourceTensor) -> None:
        values = self.checkpoint.read(scale).view("<f4").reshape(scale.shape)
        bad = np.argwhere(~(np.isfinite(values) & (values > 0)))
        if len(bad):
            row, col = map(int, bad[0])
            raise ScaleValueError(
                path=self._path(scale),
                tensor=scale.raw_name,
                expected="positive finite numbers",
                found=f"{values[row, col]} at [{row}, {col}]",
            )


def _warnings(
    extra: list[SourceTensor], config: dict[str, Any], dims: Dims, draft: Draft | None
) -> list[str]:
    found = [f"{t.raw_name} is skipped: an integer tensor of unknown name" for t in extra]
    if draft is None and (has_dspark_keys(config) or config.get("num_nextn_predict_layers")):
        found.append("config.json describes a draft, but there are no mtp.* tensors")
    if (dims.layers, dims.sizes["d"]) == PRO_SHAPE:
        found.append("this is DeepSeek-V4-Pro: ds4q has not been tested at that size")
    return found
