from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.store.patches import patch_of, patched, tag_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
TEXTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


def sealed(values: object, mac: str = "0" * 32) -> str:
    return f"{mac} 1 2 3-id a,b {json.dumps(values, sort_keys=True)}"


@given(TEXTS, TEXTS)
def test_patch_reproduces_the_record_exactly_or_there_is_none(before: object, after: object) -> None:
    old, new = sealed(before), sealed(after, "f" * 32)
    patch = patch_of(old, new)
    if patch:
        tag, _, rest = patch.partition(" ")
        assert tag.encode() == tag_of(old.encode()) and len(rest) < len(new)
        assert patched(old.encode(), rest.encode()).decode() == new


@given(TEXTS, st.dictionaries(st.sampled_from("abcd"), st.integers(), min_size=1))
def test_patch_holds_what_changed_and_nothing_else(values: dict[str, object], changed: dict[str, int]) -> None:
    before = {**values, **dict.fromkeys(changed, "x"), "stays": "y" * 100, "inner": {"stays": "z" * 100, "moves": 0}}
    after = {**before, **changed, "inner": {"stays": "z" * 100, "moves": 1}}
    patch = patch_of(sealed(before), sealed(after, "f" * 32))
    assert json.loads(patch.split(" ", 6)[-1]) == {**changed, "inner": {"moves": 1}}


@pytest.mark.parametrize("before", ["", sealed({"a": {"b": 1, "c": 2}})])
def test_there_is_no_patch_where_none_helps(before: str) -> None:
    """There was no record before; or a value is gone, which a patch cannot express."""
    assert patch_of(before, sealed({"a": {"b": 1}})) == ""
