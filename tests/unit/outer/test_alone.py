from zeroband.elastic.progress import RunShape
from zeroband.outer.alone import MEMBER_ID, Alone


def test_alone_is_dealt_the_whole_run_at_once() -> None:
    progress = Alone(RunShape(total_steps=5, batch_size=4)).progress
    assert progress.assigned == {MEMBER_ID: ((0, 20),)}
    assert progress.inner_step == 0


def test_alone_counts_its_tokens_and_is_complete_after_its_last_step() -> None:
    hooks = Alone(RunShape(total_steps=3, batch_size=4))
    before = hooks.progress
    for step in range(3):
        assert hooks.progress is before
        assert hooks.sync_gradients(step, 10) is None
        assert hooks.sync_parameters(step, 10, ends_round=step == 2) is None
    assert (hooks.progress.inner_step, hooks.progress.tokens, hooks.round) == (3, 30, 1)
    assert hooks.progress.is_complete and hooks.progress.assigned == {}


def test_alone_that_stops_early_is_not_complete() -> None:
    hooks = Alone(RunShape(total_steps=3, batch_size=4))
    for step in range(2):
        hooks.sync_gradients(step, 10)
        hooks.sync_parameters(step, 10, ends_round=step == 1)
    assert (hooks.progress.inner_step, hooks.progress.tokens) == (2, 20)
    assert not hooks.progress.is_complete and not hooks.is_time_over(2)
    assert hooks.progress.ledger.returned == ((8, 12),)
