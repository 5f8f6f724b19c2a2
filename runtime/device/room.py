"""Whether a model fits on a device, and allocating its memory; placement is planned elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import DeviceMemoryError
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.budget import available_bytes
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.plan import remedy_of_size
from ds4q.runtime.source import Tensors


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be loaded: the model of the artifact ``path``, its experts kept by ``cache``."""

    config: ModelConfig
    tensors: Tensors
    cache: CacheOptions | None
    path: object
    remedy: str | None = None  # where the model does not fit; None: one that fits the options

    @property
    def paged(self) -> bool:
        """Whether a cache of experts was asked for."""
        return self.cache is not None and self.cache.paged


def check_room(
    device: Device, layouts: Sequence[Layout], state_bytes: int, asked: Asked
) -> list[str]:
    """Refuse a model that does not fit, before its weights are read.

    An integrated GPU may report less than can be had. There the larger of its figure and the
    host's decides, and an expert cache of the user's size is tried.

    Parameters
    ----------
    state_bytes : of the first sequence, beside ``layouts``

    Returns
    -------
    a line for the user where memory could not be checked

    Raises
    ------
    DeviceMemoryError : with both numbers, and an option that works
    """
    if device.unified and asked.paged:
        return []
    needed, free = sum(layout.nbytes for layout in layouts) + state_bytes, device.free_bytes()
    if device.unified:
        try:
            free = max(free, available_bytes())
        except CacheError as error:
            return [f"{asked.path}: memory was not checked before loading: {error.what}"]
    if needed > free:
        raise DeviceMemoryError(
            f"{device.name} has too little free memory for the weights and caches of {asked.path}",
            expected=f"{needed:,} bytes",
            found=f"{free:,} bytes free",
            remedy=_remedy(needed, free, device, asked),
        )
    return []


def allocate(device: Device, layouts: Sequence[Layout], asked: Asked) -> None:
    """Take the memory; ``DeviceMemoryError`` where the device does not give it."""
    try:
        for layout in layouts:
            layout.allocate(device)
    except DeviceMemoryError as error:
        needed, free = sum(layout.nbytes for layout in layouts), device.free_bytes()
        raise DeviceMemoryError.of(
            error.function,
            error.code,
            error.code_name,
            path=asked.path,
            expected=f"{needed:,} bytes on the device in all",
            found=f"{free:,} bytes free",
            remedy=_remedy(needed, free, device, asked),
        ) from None


def _remedy(needed: int, free: int, device: Device, asked: Asked) -> str:
    if asked.remedy is not None:
        return asked.remedy
    if asked.paged:
        return "give a smaller --expert-cache, ask for a shorter context, or free memory"
    return remedy_of_size(needed, free, asked.config, asked.tensors, advice=device.unified)
