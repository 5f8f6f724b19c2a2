"""Owns the arithmetic of an expert cache: how many slots a budget buys, and what cannot be.

It also checks that a model fits into memory where all of its experts are loaded. Every layer gets
the same number of slots, each as long as the layer's longest expert. Reads the artifact's index
only; allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import CacheError, HostMemoryError
from ds4q.runtime.experts.budget import available_bytes, grant
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.predict import guess_slots
from ds4q.runtime.source import Tensors


@dataclass(frozen=True, slots=True)
class Plan:
    """The slots of a cache.

    Attributes
    ----------
    slots : experts of a layer that are in memory as demanded
    quarantine : by layer, more slots for what is read ahead of its use
    resident : all fit, so nothing is paged and the numbers before mean nothing
    """

    slots: int
    quarantine: tuple[int, ...]
    resident: bool

    @property
    def counts(self) -> tuple[int, ...]:
        """Slots by layer, all told."""
        return tuple(self.slots + extra for extra in self.quarantine)


def limits_of(options: CacheOptions, plan: Plan | None) -> dict[str, int]:
    """What bounded a run, as its trace tells it; None: it held all experts."""
    told = {
        "budget_bytes": options.budget,
        "quarantine_slots": None if plan is None else sum(plan.quarantine),
        "prefetch_top": options.prefetch_top,
    }
    return {name: limit for name, limit in told.items() if isinstance(limit, int)}


def plan_slots(
    catalogue: Catalogue,
    config: ModelConfig,
    options: CacheOptions,
    *,
    owned: int,
    needed: int,
    available: Callable[[], int] = available_bytes,
    advice: bool = False,
) -> Plan:
    """The slots that ``options`` ask for.

    Parameters
    ----------
    owned : experts of a layer that this rank holds
    needed : bytes that everything but the slots will take
    available : bytes that are free; raises ``CacheError`` where they are unknown
    advice : more may be free than that, as on integrated GPUs; see ``grant``

    Raises
    ------
    CacheError : fewer slots than one token may need, more memory than there is, or more guesses
        than there are experts
    """
    layers = config.num_hidden_layers
    if options.prefetch_top is not None and options.prefetch_top > catalogue.experts:
        raise CacheError(
            "more experts to prefetch than a layer has",
            path=catalogue.path,
            expected=f"--prefetch-top of at most {catalogue.experts}",
            found=options.prefetch_top,
        )
    least = min(config.num_experts_per_tok, owned)
    ahead = _ahead(config, options)
    if options.slots is not None:
        if not least <= options.slots <= owned:
            raise CacheError(
                "number of slots out of range",
                path=catalogue.path,
                expected=f"{least} to {owned}",
                found=options.slots,
            )
        return Plan(options.slots, ahead, resident=False)
    held = 0
    if options.adapter is not None:
        held = sum(n * layer.nbytes for n, layer in zip(ahead, catalogue.geometry, strict=True))
    wanted = min(least * catalogue.slot_bytes + held, owned * catalogue.slot_bytes)
    asked = options.budget or 0
    if asked != "auto" and asked < wanted:
        raise _too_small(catalogue, least, wanted, asked, held)
    budget = grant(
        asked,
        least=wanted,
        needed=needed,
        available=available,
        advice=advice,
        path=catalogue.path,
    )
    slots = budget // catalogue.slot_bytes
    if slots >= owned:
        return Plan(owned, (0,) * layers, resident=True)
    if options.adapter is None:
        ahead = _from_the_rest(catalogue, ahead, budget - slots * catalogue.slot_bytes)
        return Plan(slots, ahead, resident=False)
    return Plan((budget - held) // catalogue.slot_bytes, ahead, resident=False)


def check_resident(
    needed: Mapping[str, int],
    config: ModelConfig,
    tensors: Tensors,
    *,
    available: Callable[[], int] = available_bytes,
    path: object,
) -> list[str]:
    """Refuse to load all of a model where memory is too small; before its weights are read.

    Parameters
    ----------
    needed : bytes, by what they are for
    available : bytes that are free; raises ``CacheError`` where they are unknown

    Returns
    -------
    a line for the user where memory could not be checked

    Raises
    ------
    HostMemoryError : with both numbers, and an option that works
    """
    try:
        free = available()
    except CacheError as error:
        return [f"{path}: memory was not checked before loading: {error.what}"]
    total = sum(needed.values())
    if total <= free:
        return []
    parts = ", ".join(f"{nbytes:,} for {what}" for what, nbytes in needed.items() if nbytes)
    raise HostMemoryError(
        path=path,
        expected=f"{total:,} bytes free: {parts}",
        found=f"{free:,}",
        remedy=remedy_of_size(total, free, config, tensors),
    )


def working_bytes(config: ModelConfig, batch_tokens: int) -> int:
    """Roughly the bytes that a step of ``batch_tokens`` computes in, in float32."""
    d, k = config.hidden_size, config.num_experts_per_tok
    streams = 4 * config.hc_mult * d  # before and after a sub-block, and while they are mixed
    attention = 3 * config.num_attention_heads * config.head_dim
    experts = (2 * k + 4) * d + 4 * (k + 1) * config.moe_intermediate_size
    return 4 * batch_tokens * (streams + attention + experts + config.n_routed_experts)


def remedy_of_size(
    needed: int, free: int, config: ModelConfig, tensors: Tensors, *, advice: bool = False
) -> str:
    """What to do where a model with all of its experts needs more bytes than are free.

    ``advice`` : more may be free; see ``grant``.
    """
    catalogue = Catalogue(config, tensors, bind=False)
    least = config.num_experts_per_tok * catalogue.slot_bytes
    rest = needed - catalogue.file_bytes
    try:
        grant("auto", least=least, needed=rest, available=lambda: free, advice=advice)
    except CacheError as error:
        return str(error.remedy)
    return "keep part of the experts in memory (--expert-cache auto)"


def _too_small(catalogue: Catalogue, least: int, wanted: int, budget: int, held: int) -> CacheError:
    """``wanted``: bytes that would be enough; ``held``: those of them that reads ahead take."""
    beside = f", and prefetch {held:,} bytes" if held else ""
    return CacheError(
        f"the expert cache is too small: a token needs {least} slots in every layer{beside}",
        path=catalogue.path,
        expected=f"at least {wanted:,} bytes",
        found=f"{budget:,} bytes, {max(0, budget - held) // catalogue.slot_bytes} slots",
        remedy=f"--expert-cache {wanted} or more",
    )


def _ahead(config: ModelConfig, options: CacheOptions) -> tuple[int, ...]:
    """Slots by layer for reads ahead of their use: certain ones of hash layers, else guesses."""
    guesses = 0 if options.adapter is None else guess_slots(options.prefetch_top)
    return tuple(
        config.num_experts_per_tok if config.is_hash_layer(layer) else guesses
        for layer in range(config.num_hidden_layers)
    )


def _from_the_rest(catalogue: Catalogue, ahead: tuple[int, ...], rest: int) -> tuple[int, ...]:
    """As much of ``ahead``, evenly, as the bytes hold that are no whole slot in every layer."""
    one = sum(layer.nbytes for layer, n in zip(catalogue.geometry, ahead, strict=True) if n)
    share = min(max(ahead), rest // one) if one else 0
    return tuple(min(n, share) for n in ahead)
