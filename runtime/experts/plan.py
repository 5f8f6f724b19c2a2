"""Owns the arithmetic of an expert cache: how many slots a budget buys, and what cannot be.

Every layer gets the same number of slots, each as long as the layer's longest expert. Reads the
artifact's index only; allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.budget import RESERVE_BYTES, available_bytes, grant
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.predict import guess_slots

_RESERVE_PART = 8  # of what is free, where that is little


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
) -> Plan:
    """The slots that ``options`` ask for.

    Parameters
    ----------
    owned : experts of a layer that this rank holds
    needed : bytes that everything but the slots will take
    available : bytes that are free; raises ``CacheError`` where nobody can tell

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
    budget = _budget(catalogue, options, least, needed, available)
    slots = budget // catalogue.slot_bytes
    if slots >= owned:
        return Plan(owned, (0,) * layers, resident=True)
    if options.adapter is None:
        ahead = _from_the_rest(catalogue, ahead, budget - slots * catalogue.slot_bytes)
        return Plan(slots, ahead, resident=False)
    held = sum(n * layer.nbytes for n, layer in zip(ahead, catalogue.geometry, strict=True))
    slots = (budget - held) // catalogue.slot_bytes
    if slots < least:
        raise _too_small(catalogue, least, budget, held)
    return Plan(slots, ahead, resident=False)


def _budget(
    catalogue: Catalogue,
    options: CacheOptions,
    least: int,
    needed: int,
    available: Callable[[], int],
) -> int:
    """Bytes of slots, enough for ``least`` slots a layer."""
    asked, wanted = options.budget, least * catalogue.slot_bytes
    if asked == "auto":
        reserve = min(RESERVE_BYTES, available() // _RESERVE_PART)
        budget = grant(
            "auto", needed=needed, reserve=reserve, available=available, path=catalogue.path
        )
        if budget < wanted:
            raise CacheError(
                "memory leaves too little for an expert cache",
                path=catalogue.path,
                expected=f"at least {wanted:,} bytes: {least} slots in every layer",
                found=f"{budget:,} bytes, beside {needed:,} for the rest of the model and "
                f"{reserve:,} in reserve",
                remedy="free memory, shorten the context, or pass --expert-cache SIZE",
            )
        return budget
    if asked is None or asked < wanted:
        raise _too_small(catalogue, least, asked or 0, 0)
    return grant(asked, needed=needed, available=available, path=catalogue.path)


def _too_small(catalogue: Catalogue, least: int, budget: int, held: int) -> CacheError:
    """``held``: bytes that reads ahead take of the budget."""
    wanted = least * catalogue.slot_bytes + held
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
