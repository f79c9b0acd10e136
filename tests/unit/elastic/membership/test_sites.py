"""Who is of one site, and who speaks for it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import pytest

from zeroband.elastic.membership.reach import neighbours
from zeroband.elastic.membership.sites import Groups, LinkSpeeds, SitesRule, group, relay_of, speakers
from zeroband.elastic.transport.shape import route_of, shape_of
from zeroband.kernels.codec import CODECS

UNNAMED: Mapping[str, str | None] = dict.fromkeys("abcdef")


def links(inside: int, wide: int, *sites: str) -> LinkSpeeds:
    """Of members at these sites, a letter each."""
    site_of = {member: site for site in sites for member in site}
    told = dict[str, dict[str, int]]()
    for one, other in permutations(site_of, 2):
        told.setdefault(one, {})[other] = inside if site_of[one] == site_of[other] else wide
    return LinkSpeeds.of(told)


def grouped(found: LinkSpeeds, before: Mapping[str, str] | None = None, rule: SitesRule = "auto") -> list[str]:
    return ["".join(site) for site in group(UNNAMED, found, before or {}, rule)]


EACH_ALONE = list("abcdef")


def test_members_that_name_a_site_are_of_it() -> None:
    names = {"a": "x", "b": None, "c": "y", "d": "x", "e": "y"}
    for rule in ("auto", "named"):
        assert group(names, links(9000, 30, "ab", "cde"), {}, rule) == (("a", "d"), ("b",), ("c", "e"))
    assert group(names, LinkSpeeds({}), {}, "off") == (("a",), ("b",), ("c",), ("d",), ("e",))


def test_a_run_at_one_site_has_none() -> None:
    assert group(dict.fromkeys("ab", "x"), LinkSpeeds({}), {}, "named") == (("a",), ("b",))
    assert grouped(links(9000, 30, "abcdef")) == EACH_ALONE


def test_sites_form_by_links_that_are_much_faster_than_all_others() -> None:
    assert grouped(links(900, 30, "ab", "cd", "ef")) == ["ab", "cd", "ef"]
    assert grouped(links(900, 30, "ab", "cdef"), rule="named") == EACH_ALONE
    assert grouped(links(900, 30, "af", "bd", "c", "e")) == ["af", "bd", "c", "e"]


@pytest.mark.parametrize(("inside", "wide"), [(230, 30), (900, 900), (9000, 600)], ids=str)
def test_no_sites_form_where_links_are_alike_or_all_are_fast(inside: int, wide: int) -> None:
    assert grouped(links(inside, wide, "ab", "cd", "ef")) == EACH_ALONE


def test_no_sites_form_where_links_contradict_one_another() -> None:
    told = {"a": {"b": 900, "c": 900, "d": 30}, "b": {"c": 30, "d": 30}, "c": {"d": 30}}
    assert grouped(LinkSpeeds.of(told)) == EACH_ALONE


def test_of_two_directions_the_faster_one_counts() -> None:
    told = {"a": {"b": 900, "c": 30, "d": 3}, "b": {"a": 20, "d": 30}, "c": {"d": 900}, "d": {"c": 40}}
    assert grouped(LinkSpeeds.of(told)) == ["ab", "cd", "e", "f"]


def test_what_is_close_is_together_where_far_links_are_of_two_kinds() -> None:
    """Slow links part sites; those that are a little faster do not part them again."""
    told = {m: dict(rates) for m, rates in (("a", {"b": 9000, "c": 900, "d": 30}), ("b", {"c": 900, "d": 30}))}
    assert grouped(LinkSpeeds.of({**told, "c": {"d": 30}})) == ["abc", "d", "e", "f"]


def test_sites_stay_until_their_links_are_not_much_faster_any_more() -> None:
    before = dict(zip("abcdef", "bbddff", strict=True))
    assert grouped(links(150, 30, "ab", "cd", "ef")) == EACH_ALONE
    assert grouped(links(150, 30, "ab", "cd", "ef"), before) == ["ab", "cd", "ef"]
    assert grouped(links(110, 30, "ab", "cd", "ef"), before) == EACH_ALONE


@pytest.mark.parametrize(("sites", "nodes"), [(2, 20), (4, 32), (8, 64)])
@pytest.mark.parametrize("is_sparse", [True, False], ids=["payloads", "averages"])
def test_sites_found_in_parts_are_whole_once_links_that_carry_bytes_are_measured(
    sites: int, nodes: int, is_sparse: bool
) -> None:
    """Guardians of many members measure links to a few neighbours, and to those with whom bytes are exchanged."""
    site_of = {f"n{number:02}#1": number % sites for number in range(nodes)}
    members, counts = tuple(site_of), list[int]()
    known, before = {one: neighbours(one, members) for one in members}, dict[str, str]()
    for _ in range(4):
        told = {one: {m: 900 if site_of[m] == site_of[one] else 30 for m in known[one]} for one in members}
        groups = group(dict.fromkeys(members), LinkSpeeds.of(told), before, "auto")
        assert all(len({site_of[member] for member in found}) == 1 for found in groups)
        counts.append(len(groups))
        spoken = speakers(groups, dict.fromkeys(members, 1), {}, before)
        before = {member: members[place] for member, place in zip(members, spoken, strict=True)}
        shape = shape_of(1_000_000, CODECS["int8"], [1 / nodes] * nodes, sites=spoken)
        for place, member in enumerate(members):
            partners = route_of(place, spoken).partners(place, [1] * nodes) if is_sparse else shape.partners(place)
            known[member] = neighbours(member, members) | {members[partner] for partner in partners}
    assert counts[0] >= counts[-1] == sites


TWO: Groups = (("a", "c"), ("b", "d"))
EQUAL = dict.fromkeys("abcd", 10)


def test_the_fastest_uplink_speaks_and_the_first_of_equals() -> None:
    assert speakers(TWO, EQUAL, {"c": 30, "a": 29, "d": 5, "b": 5}, {}) == (2, 1, 2, 1)
    assert speakers(TWO, EQUAL, {}, {}) == (0, 1, 0, 1)


def test_who_speaks_goes_on_until_another_one_is_really_faster() -> None:
    before = {"a": "c", "c": "c", "b": "b", "d": "b"}
    assert speakers(TWO, EQUAL, {"c": 30, "a": 37}, before) == (2, 1, 2, 1)
    assert speakers(TWO, EQUAL, {"c": 30, "a": 38}, before) == (0, 1, 0, 1)
    assert speakers(TWO, EQUAL, {}, before) == (2, 1, 2, 1)


def test_another_one_speaks_where_the_speaker_is_lost() -> None:
    before = {"a": "c", "c": "c", "b": "b", "d": "b", "e": "c"}
    assert speakers((("a", "e"), ("b", "d")), dict.fromkeys("abde", 10), {"e": 30}, before) == (3, 1, 1, 3)


def test_who_brings_nothing_speaks_where_nobody_brings_anything() -> None:
    assert speakers(TWO, {**EQUAL, "a": 0, "b": 0, "d": 0}, {"a": 900}, {}) == (2, 1, 2, 1)


def test_one_that_cannot_be_dialled_speaks_where_there_is_no_other() -> None:
    assert speakers(TWO, EQUAL, {"a": 30, "c": 90}, {}, dial_out_only={"c"}) == (0, 1, 0, 1)
    assert speakers(TWO, EQUAL, {"a": 30, "c": 90}, {}, dial_out_only={"a", "c"}) == (2, 1, 2, 1)


def test_nobody_speaks_for_others_where_there_are_no_sites() -> None:
    assert speakers((("a",), ("b",)), EQUAL, {}, {}) == ()


def test_payloads_of_a_site_come_to_different_members_of_another_one() -> None:
    assert [relay_of(sender, (0, 2, 4), (1, 3), ()) for sender in (0, 2, 4)] == [1, 3, 1]
    assert [relay_of(sender, (0, 2, 4), (1, 3), (), turn=1) for sender in (0, 2, 4)] == [3, 1, 3]


def test_one_that_cannot_be_dialled_sends_to_one_that_can_where_there_is_one() -> None:
    assert [relay_of(sender, (0, 2), (1, 3), dial_out_only=(2, 3)) for sender in (0, 2)] == [1, 1]
    assert [relay_of(sender, (0, 2), (1, 3), dial_out_only=(1, 2, 3)) for sender in (0, 2)] == [1, 3]
