"""Tables of experts' addresses: what is copied to the device, and when."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import HipCallError
from ds4q.hipkern.matrix import MATRIX_BYTES, pack_matrix
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.pointers import PointerTables

EXPERTS = 3


@pytest.fixture
def device(sim: Control) -> Iterator[Device]:
    with Device.open() as device:
        yield device


def test_a_table_goes_up_when_it_changed_and_until_that_has_worked(
    sim: Control, device: Device
) -> None:
    layout, stream = Layout(), device.stream()
    contents = [
        b"".join(
            pack_matrix(4096, 0, 21, 7 + layer, e, m) for e in range(EXPERTS) for m in range(3)
        )
        for layer in range(2)
    ]
    places = [layout.reserve(len(each)) for each in contents]
    layout.allocate(device)
    tables = PointerTables(device, stream, list(zip(places, contents, strict=True)))

    def held(layer: int) -> bytes:
        found = np.empty(places[layer].nbytes, np.uint8)
        stream.download(found, places[layer].address)
        return found.tobytes()

    def expected(layer: int, addresses: dict[int, tuple[int, int, int]]) -> bytes:
        wanted = bytearray(contents[layer])
        for expert, trio in addresses.items():
            for i, address in enumerate(trio):
                at = (3 * expert + i) * MATRIX_BYTES
                wanted[at : at + 8] = address.to_bytes(8, "little")
        return bytes(wanted)

    first = {2: (5000, 6000, 7000)}
    tables.point(1, first)
    assert held(1) == expected(1, first)
    tables.point(1, first)  # a hit: nothing to tell
    tables.point(0, {})
    assert tables.uploads == 1

    second = {0: (8000, 9000, 10000)}
    sim.set(fail="hipMemcpyAsync:1:1")
    with pytest.raises(HipCallError):
        tables.point(1, second)
    assert held(1) == expected(1, first)
    tables.point(1, second)  # all is as wanted on the host, and yet it must go up
    assert held(1) == expected(1, first | second)
    assert tables.uploads == 2
