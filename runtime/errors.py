"""Owns the error classes of the runtime room. Message building belongs to the artifact room."""

from __future__ import annotations

from typing import Any

from ds4q.artifact.errors import Ds4qError, ThreadRefusedError


class RunError(Ds4qError):
    """A model cannot be loaded, checked or run as asked."""

    rule = "cannot run"


class WeightError(RunError, ValueError):
    """Packed bytes, shapes or activations that do not fit each other; nothing was read."""

    rule = "weight does not fit"


class BackendTypeError(RunError):
    """A tensor type that this backend has no kernel for."""

    rule = "no kernel for this tensor type"
    cure = "quantize with a recipe whose types this backend runs"


class TokenizerError(RunError, ValueError):
    """The artifact's tokenizer cannot be used."""

    rule = "tokenizer.json in the metadata cannot be used"
    cure = "run with --prompt-ids, or quantize again with a sound tokenizer.json"


class ControlTokenError(RunError, LookupError):
    """The prompt format needs a control token that the tokenizer does not have."""

    rule = "the tokenizer lacks a control token"
    cure = "use an artifact with the tokenizer of its model, or pass token ids"


class PromptError(RunError, ValueError):
    """A prompt that cannot be encoded."""

    rule = "bad prompt"


class ChatError(RunError, ValueError):
    """Messages, tools or a mode that the prompt format cannot express."""

    rule = "bad messages"


class EffortError(ChatError):
    """An effort whose text is not at hand."""


class ResponseFormatError(ChatError):
    """A response format whose text is not at hand."""


class SamplingError(RunError, ValueError):
    """A sampling parameter out of its range."""

    rule = "bad sampling parameter"


class LogitsError(RunError):
    """The model produced numbers that no token can be chosen from."""

    rule = "the model's logits are not finite"
    cure = "verify the artifact (ds4q verify FILE.hfq --source CHECKPOINT)"


class ConfigError(RunError, ValueError):
    """The model's config lacks a key, or asks for arithmetic that this runtime does not do."""

    rule = "config not supported"


class ModelTensorError(RunError):
    """A tensor that the config implies is absent, or has another shape or type."""

    rule = "tensor does not fit the config"


class PackedReadError(RunError, ValueError):
    """A list of reads that cannot be carried out."""

    rule = "bad list of reads"


class DeviceModelError(RunError):
    """A model whose sizes the device's kernels do not take."""

    rule = "the device's kernels cannot run this model"
    cure = "run it with --device cpu"


class SequenceError(RunError, ValueError):
    """A sequence that was closed, or that another engine made."""

    rule = "not a sequence of this engine"
    cure = "take one from its new_state"


class TokenError(RunError, ValueError):
    """A token id outside the vocabulary, or no tokens at all."""

    rule = "token id out of range"


class ContextError(RunError):
    """More tokens than the context that the engine was loaded for."""

    rule = "context is full"
    cure = "load with a larger context or send fewer tokens"


class CorpusError(RunError, ValueError):
    """A file of text or token ids that cannot be cut into windows."""

    rule = "text cannot be used"


class GateError(RunError):
    """A gate cannot be run as asked, or what it measured proves nothing."""

    rule = "gate cannot be run"


class EmptyComparisonError(GateError):
    """There is no token to compare two models on."""

    rule = "nothing to compare: the texts ask for no token"
    cure = "give a text of at least one token"


class IncompleteArmError(GateError):
    """A model was not run over the whole text."""

    rule = "incomplete comparison: a forced token has no record"
    cure = "the figures would not be those of the text; this is a bug in ds4q"


class ExtraRecordError(GateError):
    """A model was run on more than the text."""

    rule = "longer comparison: a record that no forced token asks for"
    cure = "the figures would not be those of the text; this is a bug in ds4q"


class ForcedTokenError(GateError):
    """A model was fed another token than the text holds there."""

    rule = "a model was fed another token than the forced one"
    cure = "models that read different texts cannot be compared; this is a bug in ds4q"


class FreeRunError(ForcedTokenError):
    """A model was fed its own choice in place of the text."""

    rule = "a model ran free: it was fed its own choice in place of the forced token"


class SpoolError(RunError):
    """Logits or hidden states cannot be kept on disk meanwhile."""

    rule = "cannot keep intermediate results in a temporary file"
    cure = "take fewer tokens (--tokens N), or name a folder with more room in TMPDIR"


class CalibrationError(RunError):
    """What the experts saw has no finite mean square."""

    rule = "activations are not finite"
    cure = "verify the artifact (ds4q verify FILE.hfq --source CHECKPOINT)"


class HostMemoryError(RunError):
    """A model needs more of the host's memory than is free; nothing of it was read."""

    rule = "the model does not fit into memory"


class CacheError(RunError, ValueError):
    """Experts cannot be kept as asked."""

    rule = "bad expert cache"


class TraceError(RunError, ValueError):
    """A file that is no trace, is cut short or altered, or belongs to another artifact."""

    rule = "trace cannot be read"
    cure = "record it again (ds4q run FILE.hfq --trace FILE)"


class ExpertReadError(RunError):
    """The system cannot read an expert from the artifact."""

    rule = "an expert cannot be read"
    cure = "check the disk, or copy the artifact to another one"


class DigestError(RunError):
    """The bytes of a tensor that was loaded differ from the receipt's digest."""

    rule = "the bytes that were read differ from the receipt"
    cure = (
        "the file or the disk is damaged: fetch the artifact again (ds4q registry pull TAG), or "
        "quantize it again; ds4q verify FILE.hfq lists all that is damaged"
    )


class TransportClosedError(RunError):
    """An expert is asked for from a transport that has been closed."""

    rule = "reading of experts has ended"
    cure = "load the model again"


class FillTransformError(RunError):
    """An expert that cannot be cut as a transform wants to."""

    rule = "an expert cannot be cut this way"
    cure = "use a number of ranks that divides the expert's width into whole blocks"


class AdapterError(RunError, ValueError):
    """An expert predictor that cannot be read, used here, or fitted."""

    rule = "expert predictor cannot be used"
    cure = "train one: ds4q adapter train TRACE -o FILE"


class RouterError(LogitsError):
    """A router's logits are not finite: which experts it wants is not told."""

    rule = "a router's logits are not finite"


class OwnershipError(RunError, ValueError):
    """A rank that there is not."""

    rule = "no such rank"


class ExpertRangeError(RunError, ValueError):
    """A router chose an expert or a layer that the model does not have."""

    rule = "expert id out of range"
    cure = "verify the artifact (ds4q verify FILE.hfq --source CHECKPOINT)"


class BandError(RunError, ValueError):
    """More distinct experts are asked for at once than a layer has slots."""

    rule = "more distinct experts than slots"
    cure = "ask for fewer at a time, or give a larger --expert-cache"


class SlotTimeoutError(RunError):
    """All slots that could serve a dispatch stayed in use."""

    rule = "no slot has become free"
    cure = "release leases earlier, or give a larger --expert-cache"


class SpreadError(RunError, ValueError):
    """A way to spread a model over ranks or devices that cannot be done."""

    rule = "the model cannot be spread this way"


class ProfileError(RunError, ValueError):
    """A file that is no warm-start profile, or one of another artifact."""

    rule = "warm-start profile cannot be used"
    cure = "make one from a trace of this model (ds4q cache profile TRACE -o FILE)"


class ServeError(RunError, ValueError):
    """A server that cannot be set up as asked."""

    rule = "cannot serve this way"


class QueueFullError(RunError):
    """As many requests wait as may; ``retry_after_s`` is when a place should be free."""

    rule = "the queue is full"
    cure = "try again later"

    def __init__(
        self, what: str | None = None, *, retry_after_s: float = 1.0, **where: Any
    ) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(what, **where)


class DrainingError(RunError):
    """The server ends: it finishes what it has and takes nothing new."""

    rule = "the server is shutting down"
    cure = "send the request to another server, or to this one after its restart"


class EngineError(RunError):
    """A step failed in a way that no rule foresees; ``__cause__`` is what was raised."""

    rule = "the model failed at this request"
    cure = "other requests go on; if it comes again, report it with the server's log"

    @classmethod
    def of(cls, error: Exception, what: str | None = None) -> Ds4qError:
        """``error`` as a user can be shown it: itself where it is a Ds4qError."""
        if isinstance(error, Ds4qError):
            return error
        refused = ThreadRefusedError.of(error)
        wrapped = refused or cls(what, found=f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped
