"""Members whose results of one round differ: which of them the others go on without. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroband.elastic.membership.epoch import View


def _is_disputed(view: View, round: int) -> bool:
    current = view.opening
    if current is None or current.round != round:
        return False
    return len({view.votes[m] for m in current.members if m in view.votes}) > 1


def disputes(view: View, round: int) -> int:
    """How often this round ended in different results."""
    current = view.opening
    return current.disputes + _is_disputed(view, round) if current is not None and current.round == round else 0


def outvoted(view: View, round: int) -> frozenset[str]:
    """Members whose result differed from that of the most, when this happened for the second time in one round."""
    current = view.opening
    if current is None or current.disputes == 0 or not _is_disputed(view, round):
        return frozenset()
    by_digest: dict[str, list[str]] = {}
    for member in current.members:
        if member in view.votes:
            by_digest.setdefault(view.votes[member], []).append(member)

    def trust(group: list[str]) -> tuple[int, int]:
        return (len(group), sum(view.ready[m].wants > 0 for m in group if m in view.ready))

    believed = max(by_digest.values(), key=trust)  # of two as large, who stays; then the one of the first member
    return frozenset(m for group in by_digest.values() if group is not believed for m in group)
