"""The graph is regular, mutual, a function of the beacon alone; the groups cover the cohort once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import PrivacyError
from roundtable.privacy.secagg import combine_beacon, commit, make_groups
from roundtable.privacy.secagg.graph import Graph


@given(st.integers(4, 80), st.data())
@settings(max_examples=50, deadline=None)
def test_the_graph_is_regular_and_mutual(n: int, data: st.DataObject) -> None:
    k = data.draw(st.sampled_from([*range(2, n - 1, 2), n - 1]))
    beacon = data.draw(st.binary(min_size=32, max_size=32))
    graph = Graph(n, k, beacon)
    for index in range(n):
        neighbours = graph.neighbours(index)
        assert len(set(neighbours)) == k
        assert index not in neighbours
        assert all(index in graph.neighbours(peer) for peer in neighbours)
        assert graph.neighbours(index) == Graph(n, k, beacon).neighbours(index)
        assert set(graph.holders(index)) == {*neighbours, *({index} if k == n - 1 else ())}


def test_another_beacon_gives_another_graph() -> None:
    assert Graph(60, 10, b"a").neighbours(0) != Graph(60, 10, b"b").neighbours(0)


def test_every_nonce_decides_and_commitments_name_their_owner() -> None:
    nonces = [bytes([index]) * 32 for index in range(4)]
    assert combine_beacon(nonces) != combine_beacon([*nonces[:3], bytes(32)])
    assert commit(nonces[0], "a") != commit(nonces[0], "b")
    assert commit(nonces[0], "a") != commit(nonces[1], "a")


@given(st.integers(3, 60), st.integers(3, 12), st.binary(max_size=32))
@settings(max_examples=50, deadline=None)
def test_groups_cover_the_cohort_once(n: int, size: int, beacon: bytes) -> None:
    names = [f"silo-{index}" for index in range(n)]
    if n < size:
        with pytest.raises(PrivacyError, match="do not fill"):
            make_groups(names, size, beacon)
        return
    groups = make_groups(names, size, beacon)
    assert sorted(name for group in groups for name in group) == sorted(names)
    lengths = {len(group) for group in groups}
    assert min(lengths) >= size
    assert max(lengths) - min(lengths) <= 1
    assert groups == make_groups(list(reversed(names)), size, beacon)


def test_groups_that_hide_nothing_are_refused() -> None:
    with pytest.raises(PrivacyError, match="at least 3"):
        make_groups(["a", "b", "c", "d"], 2, b"")
    with pytest.raises(PrivacyError, match="twice"):
        make_groups(["a", "a", "c", "d"], 3, b"")
