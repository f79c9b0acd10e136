from zeroband.elastic.progress import RunShape
from zeroband.outer.alone import MEMBER_ID, Alone


def test_alone_is_dealt_the_whole_run_at_once() -> None:
    progress = Alone(RunShape(total_steps=5, steps_per_round=1, batch_size=4)).progress
    assert progress.assigned == {MEMBER_ID: ((0, 20),)}
    assert progress.inner_step == 0


def test_alone_counts_its_tokens_and_is_complete_after_its_last_step() -> None:
    hooks = Alone(RunShape(total_steps=3, steps_per_round=1, batch_size=4))
    before = hooks.progress
    for step in range(3):
        assert hooks.progress is before
        assert hooks.sync_gradients(step, 10) is None
        assert hooks.sync_parameters(step, 10) is None
    assert (hooks.progress.inner_step, hooks.progress.tokens, hooks.round) == (3, 30, 1)
    assert hooks.progress.assigned == {}
