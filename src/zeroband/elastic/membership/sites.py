"""Sites: which members share a fast local network, and which of them uses the wide one. Pure.

A member belongs to the site that it names. If no member names one, sites are found by link rates: members of a site
reach one another much faster than they reach others. The proposer decides, and the plan tells all members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

from zeroband.elastic.membership.topology import CHANGE_FACTOR

SitesRule = Literal["auto", "named", "off"]

Groups = tuple[tuple[str, ...], ...]
"""Members by sites; one that has none is its own."""

FASTER = 8
"""Factor by which links inside a site must exceed all others: then the traffic inside, 4 bytes per value and the mean
back, ends before the traffic that leaves the site, even at half a byte per value (int4)."""

STILL_FASTER = 4
"""Factor down to which existing sites are kept."""

WIDE_MBIT = 500
"""Faster links do not form sites: a burst measures them less well, and there is less to gain."""


@dataclass(frozen=True)
class LinkSpeeds:
    """Mbit/s between two members, in the faster direction; what is not known is not in it."""

    between: Mapping[frozenset[str], int]

    @staticmethod
    def of(told: Mapping[str, Mapping[str, int]]) -> LinkSpeeds:
        """What members tell of their rates to others."""
        between: dict[frozenset[str], int] = {}
        for one, rates in told.items():
            for other, mbit in rates.items():
                if mbit > 0 and one != other:
                    pair = frozenset((one, other))
                    between[pair] = max(mbit, between.get(pair, 0))
        return LinkSpeeds(between)

    def among(self, members: Iterable[str]) -> LinkSpeeds:
        """Those between these members."""
        asked = set(members)
        return LinkSpeeds({pair: mbit for pair, mbit in self.between.items() if pair <= asked})

    def uplinks(self, groups: Groups) -> dict[str, int]:
        """The most that each member's links to other sites carry; nothing where that is not known."""
        found, site_of = dict[str, int](), {member: site for site in groups for member in site}
        for pair, mbit in self.between.items():
            one, other = pair
            if site_of.get(one) != site_of.get(other):
                found.update({member: max(mbit, found.get(member, 0)) for member in pair})
        return found


def group(names: Mapping[str, str | None], links: LinkSpeeds, before: Mapping[str, str], rule: SitesRule) -> Groups:
    """All members by sites. Where all are of one site nothing leaves it, and each is its own.

    `names`: of the site of each member, None where it names none. `before`: who spoke for each member in the plan
    before.
    """
    members = sorted(names)
    if rule == "off":
        return _singletons(members)
    if any(names.values()) or rule == "named":
        found = _by_key(members, {member: name for member, name in names.items() if name})
    else:
        found = _by_links(members, links.among(members), before)
    return found if len(found) > 1 else _singletons(members)


def _singletons(members: Sequence[str]) -> Groups:
    return tuple((member,) for member in members)


def _by_key(members: Sequence[str], key: Mapping[str, str]) -> Groups:
    """Members with one key together; one without is alone."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for member in members:
        groups.setdefault((member in key, key.get(member, member)), []).append(member)
    return tuple(tuple(found) for found in groups.values())


def _by_links(members: Sequence[str], links: LinkSpeeds, before: Mapping[str, str]) -> Groups:
    """Members joined by links that are much faster than all others; each alone if the gap is not clear."""
    rates = sorted(set(links.between.values()))
    for slower, faster in pairwise(rates):  # the widest gap between two sites has the slowest links
        if slower > WIDE_MBIT or faster < FASTER * slower:
            continue
        found = _joined(members, links, faster)
        if _is_apart(found, links, FASTER):
            return found
    kept = _by_key(members, {m: before[m] for m in members if m in before})
    return kept if _is_apart(kept, links, STILL_FASTER) else _singletons(members)


def _joined(members: Sequence[str], links: LinkSpeeds, least_mbit: int) -> Groups:
    """Connected components of the graph of fast links."""
    leader = {member: member for member in members}

    def lead(member: str) -> str:
        while leader[member] != member:
            member = leader[member]
        return member

    for pair, mbit in links.between.items():
        if mbit >= least_mbit:
            one, other = sorted(lead(member) for member in pair)
            leader[other] = one
    return _by_key(members, {member: lead(member) for member in members})


def _is_apart(groups: Groups, links: LinkSpeeds, factor: int) -> bool:
    """Whether all known links inside groups are `factor` times faster than those between them; both must exist."""
    inside = {frozenset(pair) for found in groups for pair in combinations(found, 2)}
    fast = [mbit for pair, mbit in links.between.items() if pair in inside]
    wide = [mbit for pair, mbit in links.between.items() if pair not in inside]
    return bool(fast and wide) and min(fast) >= factor * max(wide)


def speakers(
    groups: Groups,
    weights: Mapping[str, int],
    uplinks: Mapping[str, int],
    before: Mapping[str, str],
    dial_out_only: Collection[str] = (),
) -> tuple[int, ...]:
    """The speaker of each member's site, as places in the order of all members' ids; empty if there are no sites.

    A site keeps its speaker until another member's uplink is faster by WORTH; a new speaker is the member with the
    fastest uplink, the first of equals. A member without weight speaks only if no member of its site contributes: it
    cannot feed back its encoding error. A dial-out-only member speaks only if its site has no other: two of them need
    a relay. `uplinks`: Mbit/s to the other sites; 0: not known.
    """
    if all(len(site) == 1 for site in groups):
        return ()

    def rank(member: str) -> tuple[bool, bool, float, str]:
        uplink, spoke = uplinks.get(member, 0), before.get(member) == member
        return (
            weights[member] == 0,
            member in dial_out_only,
            -CHANGE_FACTOR * uplink if spoke else -uplink,
            "" if spoke else member,
        )

    spoken = {member: min(site, key=rank) for site in groups for member in site}
    places = {member: place for place, member in enumerate(sorted(spoken))}
    return tuple(places[spoken[member]] for member in places)


def relay_of(
    sender: int, home: Sequence[int], site: Sequence[int], dial_out_only: Collection[int], turn: int = 0
) -> int:
    """Who takes a sender's payload for another site and passes it on there. Members are told by their places.

    The senders of a site come to different members of the other one, and two sites of one size exchange all between
    pairs. Of two that cannot be dialled neither takes from the other while there is one that can: they would need a
    relay between them. `home`: the sender's site. `turn`: another member's for each number.
    """
    fit = [member for member in site if member not in dial_out_only] if sender in dial_out_only else site
    fit = fit or site
    return fit[(home.index(sender) + turn) % len(fit)]
