"""Sites: which members share a fast local network, and which of them uses the wide-area one. Pure.

A member belongs to the site that it names. If no member names one, sites are detected by link rates: links within a
site are much faster than others. The proposer decides, and the plan records the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

from zeroband.elastic.membership.topology import CHANGE_FACTOR

SitesRule = Literal["auto", "named", "off"]

Groups = tuple[tuple[str, ...], ...]
"""Members grouped by site; a member without one forms its own group."""

FASTER = 8
"""Factor by which links inside a site must exceed all others: then traffic inside (4 bytes per value, and the mean
back) ends before the traffic that leaves the site, even at half a byte per value (int4)."""

STILL_FASTER = 4
"""Factor down to which existing sites are kept."""

WIDE_MBIT = 500
"""Wide-area links above this rate form no sites: bursts measure them poorly, and there is less to gain."""


@dataclass(frozen=True)
class LinkSpeeds:
    """Known rates between pairs of members in Mbit/s, in the faster direction."""

    between: Mapping[frozenset[str], int]

    @staticmethod
    def of(measured: Mapping[str, Mapping[str, int]]) -> LinkSpeeds:
        """Merge the rates that members measured to others."""
        between: dict[frozenset[str], int] = {}
        for one, rates in measured.items():
            for other, mbit in rates.items():
                if mbit > 0 and one != other:
                    pair = frozenset((one, other))
                    between[pair] = max(mbit, between.get(pair, 0))
        return LinkSpeeds(between)

    def among(self, members: Iterable[str]) -> LinkSpeeds:
        """Keep only links between these members."""
        asked = set(members)
        return LinkSpeeds({pair: mbit for pair, mbit in self.between.items() if pair <= asked})

    def uplinks(self, groups: Groups) -> dict[str, int]:
        """Return each member's fastest rate to another site, where known."""
        found, site_of = dict[str, int](), {member: site for site in groups for member in site}
        for pair, mbit in self.between.items():
            one, other = pair
            if site_of.get(one) != site_of.get(other):
                found.update({member: max(mbit, found.get(member, 0)) for member in pair})
        return found


def group(names: Mapping[str, str | None], links: LinkSpeeds, before: Mapping[str, str], rule: SitesRule) -> Groups:
    """Group all members by site. If all are of one site, each forms its own group, since nothing leaves the site.

    `names`: site of each member, None if it names none. `before`: each member's speaker in the previous plan.
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
    """Group members with equal keys; a member without one forms its own group."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for member in members:
        groups.setdefault((member in key, key.get(member, member)), []).append(member)
    return tuple(tuple(found) for found in groups.values())


def _by_links(members: Sequence[str], links: LinkSpeeds, before: Mapping[str, str]) -> Groups:
    """Group members joined by links that are much faster than all others; no groups without a clear gap."""
    rates = sorted(set(links.between.values()))
    for slower, faster in pairwise(rates):  # ascending, so that the slowest links are tried as site borders first
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
    """Whether all known links inside groups are `factor` times as fast as those between them; both must exist."""
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
    """Return the place of each member's speaker, in id order; empty if there are no sites.

    A site keeps its speaker until another member's uplink is faster by CHANGE_FACTOR; a new speaker has the fastest
    uplink. A member without weight speaks only if no member of its site contributes, since it cannot feed back its
    encoding error. A dial-out-only member speaks only if its site has no other, since two of them need a relay.
    `uplinks`: Mbit/s to other sites; 0: unknown.
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
    """Return the member of another site that receives a sender's payload and forwards it there. Members are places.

    Senders of a site are spread over the members of the other one. A dial-out-only sender avoids dial-out-only
    receivers, which would need a relay. `home`: the sender's site. `turn`: each number selects another receiver.
    """
    fit = [member for member in site if member not in dial_out_only] if sender in dial_out_only else site
    fit = fit or site
    return fit[(home.index(sender) + turn) % len(fit)]
