from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.progress import RunShape
from zeroband.outer.no_algorithm import MEMBER_ID, NoAlgorithm


def step(hooks: NoAlgorithm, number: int) -> None:
    assert hooks.sync_gradients(number, 10) is None
    assert hooks.sync_parameters(number, ends_round=False) == ()


def test_alone_holds_all_samples_of_the_run_and_commits_each_step() -> None:
    hooks = NoAlgorithm(RunShape(total_steps=5, batch_size=4))
    assert (hooks.progress.assigned, hooks.progress.inner_step) == ({MEMBER_ID: ((0, 20),)}, 0)
    step(hooks, 0)
    assert (hooks.progress.assigned, hooks.progress.inner_step) == ({MEMBER_ID: ((4, 20),)}, 1)
    assert hooks.upcoming() == ((4, 20),)


def test_alone_counts_its_tokens_and_is_complete_after_its_last_step() -> None:
    hooks = NoAlgorithm(RunShape(total_steps=3, batch_size=4))
    for number in range(3):
        assert not hooks.progress.is_complete
        step(hooks, number)
    assert (hooks.progress.inner_step, hooks.progress.tokens, hooks.round) == (3, 30, 3)
    assert hooks.progress.is_complete and hooks.progress.assigned == {}


def test_alone_that_stops_early_is_not_complete_and_has_used_what_it_was_dealt() -> None:
    hooks = NoAlgorithm(RunShape(total_steps=3, batch_size=4))
    step(hooks, 0)
    assert (hooks.progress.inner_step, hooks.progress.tokens) == (1, 10)
    assert not hooks.progress.is_complete and not hooks.is_time_over(2)
    assert hooks.progress.ledgers[SHARED].returned == () and hooks.upcoming() == ((4, 12),)


def test_alone_goes_on_after_a_checkpoint_with_the_samples_that_it_had_not_used() -> None:
    before, after = (NoAlgorithm(RunShape(total_steps=steps, batch_size=4)) for steps in (3, 4))
    step(before, 0)
    after.adopt(before.round, before.record)
    assert (after.inner_step, after.round, after.upcoming()) == (1, 1, ((4, 16),))


def test_payload_of_alone_records_its_progress_and_one_session() -> None:
    hooks = NoAlgorithm(RunShape(total_steps=3, batch_size=4))
    session = hooks.record["session"]
    step(hooks, 0)
    assert hooks.record == {"progress": hooks.progress.to_record(), "session": session}
