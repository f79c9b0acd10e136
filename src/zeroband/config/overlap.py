"""Which overlaps of rounds with training can be: rules on plain numbers. Pure; no torch."""

from __future__ import annotations


def overlap_problem(
    *,
    inner_steps: int,
    has_fixed_steps: bool,
    fragments: int,
    overlap: int | None,
    is_eager: bool,
    has_deadline: bool,
) -> str | None:
    """What is wrong with these settings of [outer], and the way out; None: nothing. `overlap`: None is "full"."""
    if inner_steps % fragments:
        below = inner_steps // fragments * fragments
        nearest = f"{below} or {below + fragments}" if below else str(fragments)
        return f"outer.inner_steps={inner_steps} is not a multiple of outer.fragments={fragments}; nearest: {nearest}"
    if fragments > 1 and not has_fixed_steps:
        return f"outer.fragments={fragments} needs a fixed outer.inner_steps; drop outer.inner_seconds"
    if overlap and not has_fixed_steps:
        return f'outer.overlap={overlap} counts steps of a round without a fixed number of them; set it to "full" or 0'
    if overlap is not None and overlap > inner_steps // fragments:
        most = inner_steps // fragments
        return f"outer.overlap={overlap} is longer than inner_steps / fragments = {most}; set at most {most}"
    if is_eager and overlap == 0:
        return 'outer.merge="eager" has no effect where training waits (outer.overlap=0); set outer.overlap = "full"'
    if has_deadline and (fragments > 1 or overlap != 0):
        return (
            "outer.straggler_deadline_s needs outer.fragments=1 and outer.overlap=0: a late update would meet another "
            "fragment, or its own node a phase further; drop it, or let rounds take a fixed time (outer.inner_seconds)"
        )
    return None
