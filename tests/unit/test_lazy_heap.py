"""A heap whose items move and leave is a sorted dict, whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from continuum_connector.scheduler.queue import LazyHeap

ITEMS = st.integers(0, 8)
CALLS = st.lists(st.tuples(st.sampled_from(["push", "discard", "first"]), ITEMS, ITEMS))


@given(CALLS)
def test_the_first_is_the_smallest_and_among_equals_the_one_pushed_first(
    calls: list[tuple[str, int, int]],
) -> None:
    heap: LazyHeap[int] = LazyHeap()
    model: dict[int, tuple[int, int]] = {}
    for number, (what, item, key) in enumerate(calls):
        if what == "push":
            heap.push((key,), item)
            model[item] = (key, number)
        elif what == "discard":
            heap.discard(item)
            model.pop(item, None)
        in_order = sorted(model, key=model.__getitem__)
        assert list(heap) == in_order
        assert (len(heap), item in heap) == (len(model), item in model)
        first = heap.first()
        assert first == (((model[in_order[0]][0],), in_order[0]) if model else None)


def test_stale_entries_do_not_pile_up() -> None:
    heap: LazyHeap[str] = LazyHeap()
    for key in range(10_000):
        heap.push((-key,), "a")
        heap.push((key,), "b")
    assert len(heap._entries) <= 64 + 2 * 2 + 1
    assert list(heap) == ["a", "b"]
