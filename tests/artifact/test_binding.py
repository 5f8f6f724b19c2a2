"""The registry: identity, all or nothing, and the owners of a split layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.binding import Compact, Owner, Registry
from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.tables import Table, expert_name
from tests.artifact.mixed import BOOKS_4, BOOKS_8, Row, gumix, p4mix
from tests.checks import check_refused

LAYERS = (3, 5)
EXPERTS = 6
ODD = 4  # this expert's tensors are of another type: the tables have no row for it
OUT, IN = 64, 128


def rows(books: Any) -> list[Row]:
    """Expert n's first level tells it from the others."""
    out: list[Row] = []
    for n in range(EXPERTS):
        first = [[book[0] + n, *book[1:]] for book in books]
        out.append((0, None) if n == ODD else (1, first))
    return out


def tables() -> list[Table]:
    mixed = set(range(EXPERTS)) - {ODD}
    found = []
    for layer in LAYERS:
        for surface in (0, 1):
            raw = gumix(rows(BOOKS_4), layer=layer, surface=surface, out=OUT, in_=IN)
            found.append(Table.decode(raw, 106, mixed=mixed))
        raw = p4mix(rows(BOOKS_8), layer=layer, out=OUT, in_=IN)
        found.append(Table.decode(raw, 105, mixed=mixed))
    return found


TABLES = tables()
GATE = expert_name(3, 1, "w1")


def row_of(layer: int, expert: int, projection: str) -> MixRow:
    (table,) = [t for t in TABLES if (t.layer, t.projection) == (layer, projection)]
    return table.row(expert)


def unregistered(registry: Registry, slot: Any, name: str) -> None:
    error = check_refused(CodingError, lambda: registry.row(slot, name), tensor=name)
    assert error.what.startswith("mix-unregistered: ")


# ------------------------------------------------------------------ one slot


def test_bound_slot_has_its_row_until_it_is_unbound() -> None:
    registry = Registry(TABLES)
    unregistered(registry, 7, GATE)
    registry.bind(7, GATE)
    assert registry.row(7, GATE) == row_of(3, 1, "w1")
    assert len(registry) == 1
    registry.unbind(7)
    unregistered(registry, 7, GATE)
    assert len(registry) == 0


def test_a_slot_answers_for_its_own_tensor_only() -> None:
    registry = Registry(TABLES)
    registry.bind(7, GATE)
    for other in (expert_name(3, 2, "w1"), expert_name(5, 1, "w1"), expert_name(3, 1, "w3")):
        unregistered(registry, 7, other)
    unregistered(registry, 8, GATE)  # a tensor that was moved is not bound where it went


def test_a_slot_is_bound_once() -> None:
    registry = Registry(TABLES)
    registry.bind(7, GATE)
    for name in (GATE, expert_name(3, 2, "w1")):
        says = ["mix-binding: ", "bound already", GATE]
        check_refused(CodingError, partial(registry.bind, 7, name), tensor=name, says=says)
    assert registry.row(7, GATE) == row_of(3, 1, "w1")
    registry.bind(8, GATE)  # one tensor may lie in two slots
    registry.unbind(7)
    registry.bind(7, expert_name(5, 0, "w2"))
    assert registry.row(7, expert_name(5, 0, "w2")) == row_of(5, 0, "w2")


def test_unbinding_nothing_is_an_error() -> None:
    check_refused(CodingError, lambda: Registry(TABLES).unbind(7), says=["mix-binding: ", "7"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (expert_name(4, 0, "w1"), "mix-binding: there is no decode table"),
        ("layers.3.attn.wq_a.weight", "mix-binding: there is no decode table"),
        (
            expert_name(3, ODD, "w1"),
            f"mix-row-unmapped: the decode table has no row for expert {ODD}",
        ),
        (expert_name(3, EXPERTS, "w2"), "mix-row-unmapped: "),
    ],
)
def test_only_what_a_table_serves_is_bound(name: str, says: str) -> None:
    registry = Registry(TABLES)
    check_refused(CodingError, lambda: registry.bind(0, name), says=[says])
    assert len(registry) == 0


def test_a_row_of_mode_2_is_not_bound() -> None:
    bad = replace(TABLES[0], rows=(MixRow(2, bytes(16)),))
    registry = Registry([bad])
    says = ["mix-binding: ", "mode"]
    check_refused(CodingError, lambda: registry.bind(0, expert_name(3, 0, "w1")), says=says)
    assert len(registry) == 0


# ------------------------------------------------------------------ any history

SLOTS = st.integers(0, 5)
NAMES = st.builds(
    expert_name, st.sampled_from([3, 4, 5]), st.integers(0, EXPERTS), st.sampled_from(["w1", "w2"])
)
STEPS = st.lists(
    st.tuples(st.just("unbind"), SLOTS)
    | st.tuples(st.just("bind"), st.lists(st.tuples(SLOTS, NAMES), max_size=4)),
    max_size=25,
)


def bindable(pairs: list[tuple[int, str]], bound: dict[int, str]) -> bool:
    slots = [slot for slot, _ in pairs]
    served = all(
        name.split(".")[1] != "4" and int(name.split(".")[4]) not in (ODD, EXPERTS)
        for _, name in pairs
    )
    return served and len(set(slots)) == len(slots) and not bound.keys() & set(slots)


@given(STEPS)
def test_any_history_leaves_what_a_dict_would_hold(steps: list[tuple[str, Any]]) -> None:
    registry, bound = Registry(TABLES), dict[int, str]()
    for word, what in steps:
        call: Callable[[], None]
        if word == "bind":
            call, good = partial(registry.bind_all, what), bindable(what, bound)
            after = bound | dict(what)
        else:
            call, good = partial(registry.unbind, what), what in bound
            after = {slot: name for slot, name in bound.items() if slot != what}
        if good:
            call()
            bound = after
        else:
            check_refused(CodingError, call)
        assert len(registry) == len(bound)
        for slot, name in bound.items():
            layer, expert, projection = name.split(".")[1], name.split(".")[4], name.split(".")[5]
            assert registry.row(slot, name) == row_of(int(layer), int(expert), projection)


def test_undo_goes_backwards_and_leaves_older_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(TABLES)
    registry.bind("old", GATE)
    released: list[Any] = []
    release = Registry._release

    def watched(self: Registry, slot: Any) -> None:
        released.append(slot)
        release(self, slot)

    monkeypatch.setattr(Registry, "_release", watched)
    names = [expert_name(3, n, "w1") for n in (0, 1, 2, ODD, 3)]
    with pytest.raises(CodingError, match="mix-row-unmapped"):
        registry.bind_all(enumerate(names))
    assert released == [2, 1, 0]
    assert len(registry) == 1
    assert registry.row("old", GATE) == row_of(3, 1, "w1")


def test_an_interrupt_while_binding_leaves_nothing() -> None:
    registry = Registry(TABLES)

    def pairs() -> Any:
        yield 0, GATE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.bind_all(pairs())
    assert len(registry) == 0
    registry.bind(0, GATE)  # and the lock is free


def test_threads_share_a_registry() -> None:
    registry, failed = Registry(TABLES), list[BaseException]()

    def work(slot: int) -> None:
        try:
            for _ in range(200):
                registry.bind(slot, GATE)
                assert registry.row(slot, GATE) == row_of(3, 1, "w1")
                registry.unbind(slot)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(registry) == 0


# ------------------------------------------------------------------ owners


def compact(key: str, projection: str, n: int) -> Compact:
    """A buffer of ``n`` experts."""
    type_id, block_bytes = (105, 14) if projection == "w2" else (106, 10)
    return Compact(key, type_id, (n, OUT, IN), n * OUT * IN // 32 * block_bytes)


def owner(key: str, *ids: int) -> Owner:
    """An owner of the same experts in each projection; without ids it has no buffer."""
    held = {p: compact(f"{key}-{p}", p, len(ids)) if ids else None for p in ("w1", "w2", "w3")}
    return Owner(dict.fromkeys(held, ids), held)


NOBODY = Owner()


@pytest.mark.parametrize("ids", [(0, 1, 2), (3, 0), (5,)])
def test_rows_follow_the_local_slots(ids: tuple[int, ...]) -> None:
    registry = Registry(TABLES)
    registry.bind_owners(3, owner("hot", *ids), owner("cold"))
    assert len(registry) == 3 * len(ids)
    for projection in ("w1", "w2", "w3"):
        for local, expert in enumerate(ids):
            name = expert_name(3, expert, projection)
            found = registry.row((f"hot-{projection}", local), name)
            assert found == row_of(3, expert, projection)


def test_hot_and_cold_on_gpus() -> None:
    registry = Registry(TABLES)
    registry.bind_owners(3, owner("hot", 5, 0), owner("cold", 2, 1, 3), "gpu")
    assert len(registry) == 15
    name = expert_name(3, 3, "w2")
    assert registry.row(("cold-w2", 2), name) == row_of(3, 3, "w2")


@pytest.mark.parametrize("cold", [NOBODY, owner("cold")])
def test_hot_only(cold: Owner) -> None:
    registry = Registry(TABLES)
    registry.bind_owners(3, owner("hot", 0, 2), cold, "none")
    assert len(registry) == 6
    says = ["mix-binding: ", "no cold owner"]
    given_some = partial(registry.bind_owners, 5, owner("a", 0), owner("b", 1), "none")
    check_refused(CodingError, given_some, says=says)
    assert len(registry) == 6


def test_null_tensor_without_experts_is_success() -> None:
    registry = Registry(TABLES)
    for cold in (NOBODY, owner("cold")):
        registry.bind_owners(3, NOBODY, cold)
        registry.bind_owners(4, NOBODY, cold)  # a layer without a table
    assert len(registry) == 0


def test_cold_cpu_is_refused_whatever_it_holds() -> None:
    registry = Registry(TABLES)
    for cold in (NOBODY, owner("cold", 1)):
        call = partial(registry.bind_owners, 3, owner("hot", 0), cold, "cpu")
        check_refused(CodingError, call, says=["mix-binding: ", "cold owner on the CPU"])
    assert len(registry) == 0
    Registry([]).bind_owners(3, NOBODY, NOBODY, "cpu")  # no tensor is mixed


def but(base: Owner, projection: str, ids: tuple[int, ...], held: Compact | None) -> Owner:
    return Owner({**base.experts, projection: ids}, {**base.tensors, projection: held})


DOWN = compact("cold-w2", "w2", 2)
PAIR = owner("cold", 1, 2)
BAD_OWNERS: dict[str, tuple[Owner, str]] = {
    "ids without a tensor": (but(PAIR, "w2", (1, 2), None), "there is no tensor"),
    "tensor without ids": (but(PAIR, "w2", (), DOWN), "no experts"),
    "wrong type": (but(PAIR, "w2", (1, 2), replace(DOWN, type_id=104)), "wrong type"),
    "type of the others": (but(PAIR, "w2", (1, 2), replace(DOWN, type_id=106)), "wrong type"),
    "fewer slots than ids": (but(PAIR, "w2", (1, 2, 3), DOWN), "wrong shape"),
    "other dims": (but(PAIR, "w2", (1, 2), replace(DOWN, shape=(2, IN, OUT))), "wrong shape"),
    "no data": (but(PAIR, "w2", (1, 2), replace(DOWN, nbytes=0)), "wrong length"),
    "id out of range": (but(PAIR, "w2", (1, EXPERTS), DOWN), "below 6"),
    "masked id": (but(PAIR, "w2", (1, -1), DOWN), "below 6"),
    "id twice": (but(PAIR, "w2", (2, 2), DOWN), "each once"),
    "expert of another type": (but(PAIR, "w2", (1, ODD), DOWN), "has no row for expert 4"),
}


@pytest.mark.parametrize("name", BAD_OWNERS)
def test_bad_owner_binds_nothing_of_the_layer(name: str) -> None:
    cold, says = BAD_OWNERS[name]
    registry = Registry(TABLES)
    registry.bind_owners(5, owner("other", 0, 1), NOBODY)
    before = len(registry)
    # gate and up of both owners and down of the hot one are bound when the error is met
    call = partial(registry.bind_owners, 3, owner("hot", 0, 3), cold)
    check_refused(CodingError, call, says=[says])
    assert len(registry) == before
    unregistered(registry, ("hot-w1", 0), expert_name(3, 0, "w1"))
    registry.bind_owners(3, owner("hot", 0, 3), PAIR)


def test_a_layer_without_tables_takes_no_mixed_tensor() -> None:
    registry = Registry(TABLES)
    call = partial(registry.bind_owners, 4, owner("hot", 0), NOBODY)
    check_refused(CodingError, call, says=["no decode table", "layers.4.ffn.experts.w1.mix_table"])


def test_gate_and_up_come_before_down() -> None:
    registry = Registry(TABLES)
    bad = but(but(PAIR, "w2", (1, 2), None), "w3", (1, 2), None)
    check_refused(CodingError, lambda: registry.bind_owners(3, bad, NOBODY), tensor=TABLES[1].name)
