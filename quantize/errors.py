"""Owns the error classes of the quantize room. Message building belongs to the artifact room."""

from __future__ import annotations

from ds4q.artifact.errors import Ds4qError


class SourceError(Ds4qError, ValueError):
    """The checkpoint breaks a rule, or cannot be read."""

    rule = "not a usable checkpoint"


class MissingFileError(SourceError):
    """A file or folder of the checkpoint is not there."""

    rule = "not found"
    cure = "download the file, or name another folder"


class FileKindError(SourceError):
    """Something else stands where a file of the checkpoint should be."""

    rule = "not a checkpoint file"
    cure = "name a folder with .safetensors files, or one .safetensors file"


class SourceReadError(SourceError):
    """The system refused a read, or gave fewer bytes than the file had when it was opened."""

    rule = "cannot be read"


class ChangedSourceError(SourceError):
    """A shard was replaced or modified since it was opened."""

    rule = "source changed while it was read"
    cure = "run the command again on files that nothing writes to"


class UnfinishedFileError(SourceError):
    """A downloader has not finished this file; what it lacks may read as zeros."""

    rule = "the download of this file is not finished"
    cure = "let the downloader finish; if the file is whole, remove what lies beside it"


class LfsPointerError(SourceError):
    """A git-lfs pointer stands in place of the file."""

    rule = "this is a git-lfs pointer, not the file itself"
    cure = "fetch the content with 'git lfs pull' or 'hf download'"


class HeaderLengthError(SourceError):
    """The first eight bytes promise a header that the file cannot hold."""

    rule = "bad safetensors header length"
    cure = "the file is truncated or not safetensors; download it again, or move it away"


class HeaderError(SourceError):
    """The header is not the JSON that safetensors prescribes."""

    rule = "bad safetensors header"
    cure = "the file is damaged or not safetensors; download it again"


class UnsupportedDtypeError(SourceError):
    """The file may be intact, but this dtype is not known here."""

    rule = "unsupported dtype"
    cure = "the file need not be damaged; use a checkpoint in DeepSeek's published types"


class TensorSizeError(SourceError):
    """Shape, dtype and byte range of one tensor contradict each other."""

    rule = "shape and byte range disagree"
    cure = "the file is damaged; download it again"


class TensorLayoutError(SourceError):
    """The byte ranges of a shard's tensors overlap or leave bytes over."""

    rule = "tensors do not cover the data exactly"
    cure = "the file is damaged; download it again"


class TruncatedShardError(SourceError):
    """The file ends before the last tensor does."""

    rule = "file is too short"
    cure = "the file is truncated; download it again"


class TrailingBytesError(SourceError):
    """The file goes on after the last tensor."""

    rule = "bytes after the last tensor"
    cure = "the file is damaged; download it again"


class DuplicateNameError(SourceError):
    """Two tensors would carry one name."""

    rule = "tensor name appears twice"
    cure = "keep one copy of each tensor"


class JsonFileError(SourceError):
    """A JSON file of the checkpoint is not one strict JSON object, or a field has a wrong kind."""

    rule = "not usable JSON"
    cure = "download the file again"


class ShardNameError(SourceError):
    """A shard name in the index that could lead out of the folder."""

    rule = "unsafe shard name"
    cure = (
        "shard names must be files in the checkpoint's folder or below it, ending in .safetensors"
    )


class IndexMismatchError(SourceError):
    """model.safetensors.index.json and the shards contradict each other."""

    rule = "index and shards disagree"
    cure = "download shards and index again, from one revision"


class ConfigError(SourceError):
    """config.json lacks a key or holds a value of the wrong kind."""

    rule = "bad config.json"
    cure = "use the config.json that belongs to the checkpoint"


class UnsupportedModelError(SourceError):
    """The checkpoint may be sound, but its format or arithmetic is not the one built here."""

    rule = "unsupported model"
    cure = "use a deepseek_v4 checkpoint with FP4 experts, as DeepSeek publishes it"


class UnexpectedTensorError(SourceError):
    """A tensor that the config does not imply; nothing is dropped silently."""

    rule = "unexpected tensor"
    cure = "check that config.json and shards belong together"


class MissingTensorError(SourceError):
    """Tensors that the config implies are absent."""

    rule = "tensor is missing"
    cure = "complete the checkpoint, or give --allow-partial for a part of a model"


class ScalePairError(SourceError):
    """A weight without its scale, a scale without its weight, or two scales for one weight."""

    rule = "weight and scale do not pair up"
    cure = "complete the checkpoint; a quantized weight needs exactly one scale"


class TensorDtypeError(SourceError):
    """A known tensor in a dtype that it cannot have."""

    rule = "dtype does not fit this tensor"
    cure = "use a checkpoint in DeepSeek's published types"


class TensorShapeError(SourceError):
    """A known tensor in a shape that the config, or its partner, contradicts."""

    rule = "shape does not fit"
    cure = "check that config.json and shards belong together"


class ScaleValueError(SourceError):
    """A stored scale that is zero, negative, infinite or not a number."""

    rule = "illegal scale value"
    cure = "the tensor is damaged; download its shard again"


class JobError(Ds4qError):
    """A plan, a pipeline or an output file cannot be made as asked."""

    rule = "cannot quantize"


class SourceValueError(SourceError):
    """A value that no artifact may hold: a NaN, an infinity, a NaN scale, a negative id."""

    rule = "illegal value"
    cure = "the tensor is damaged; download its shard again"


class InexactError(SourceError):
    """A value that the lossless recipe would have to round."""

    rule = "value would be rounded"
    cure = "use --recipe fp4-q8 or fp4-f16, which report what they round"


class SaturationError(JobError):
    """A tensor with more blocks outside the range of its type than the user allowed."""

    rule = "tensor does not fit the range of its type"
    cure = (
        "give its experts another type (fp4 holds every value), or accept the loss with "
        "--resume --allow-saturation"
    )


class BooksError(Ds4qError):
    """Codebooks of an artifact that a fit on its source does not give."""

    rule = "codebooks differ from those fitted on the source"


class ImatrixError(Ds4qError, ValueError):
    """A file of activation statistics that cannot be used."""

    rule = "not a usable imatrix"
    cure = "calibrate again, or copy the file again"


class ImatrixModelError(ImatrixError):
    """Statistics of another model than the one at hand."""

    rule = "imatrix of another model"
    cure = "calibrate on an artifact of this checkpoint (ds4q calibrate)"


class ImatrixMissingError(ImatrixError):
    """A layer or tensor that the imatrix has no statistics of."""

    rule = "the imatrix lacks statistics"
    cure = "calibrate the whole model (ds4q calibrate)"


class ImatrixValueError(ImatrixError):
    """A number that no statistics can hold: NaN, infinity, a negative mean square or count."""

    rule = "illegal number in the imatrix"


class PageError(Ds4qError):
    """A page that cannot be made here."""

    rule = "the page of --html needs jinja2, which is not installed"
    cure = "pip install 'ds4q[report]'"


class EncodingError(SourceError):
    """The source of a release's prompt encoder, or what an artifact kept of it, cannot be read."""

    rule = "not a usable encoding file"
    cure = "use encoding_dsv4.py of a DeepSeek-V4 release, or the folder encoding/ that holds it"
