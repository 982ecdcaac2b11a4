from hypothesis import given
from hypothesis import strategies as st

from aenv.cli.tree import tree


def row(identifier, parent=None):
    return {"sandboxID": identifier} | ({"parentID": parent} if parent else {})


def drawn(*rows):
    return [branches + row["sandboxID"] for branches, row in tree(rows)]


def test_children_come_below_their_parents():
    assert drawn(row("c", "a"), row("d", "c"), row("b", "a"), row("a"), row("e")) == [
        "a",
        "├─ c",
        "│  └─ d",
        "└─ b",
        "e",
    ]


def test_a_parent_that_is_gone():
    assert drawn(row("b", "gone"), row("c", "b")) == ["b", "└─ c"]
    assert drawn() == []


def test_a_long_chain():
    rows = [row("0"), *(row(str(n), str(n - 1)) for n in range(1, 3000))]
    assert [found for _, found in tree(rows)] == rows


@given(st.lists(st.integers(-1, 20), max_size=20))
def test_every_row_once_and_after_its_parent(parents):
    rows = [row(str(n), str(p) if p < n else None) for n, p in enumerate(parents)]
    seen = [found["sandboxID"] for _, found in tree(rows)]
    assert sorted(seen) == sorted(str(n) for n in range(len(rows)))
    for found in rows:
        if (parent := found.get("parentID")) in seen:
            assert seen.index(parent) < seen.index(found["sandboxID"])
