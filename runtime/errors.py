"""Owns the error classes of the runtime room. Message building belongs to the artifact room."""

from __future__ import annotations

from ds4q.artifact.errors import Ds4qError


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
