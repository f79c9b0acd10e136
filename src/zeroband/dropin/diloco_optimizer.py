"""`zeroband.DiLoCoOptimizer`: a torch optimizer that takes the outer steps of a run by itself."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeroband.dropin.inner import (
    OptimizerFactory,
    Params,
    ScheduledOptimizer,
    SchedulerFactory,
    bring_up,
    build_optimizer,
    default_inner,
)
from zeroband.dropin.session import DropInOptions, Session
from zeroband.dropin.settings import outer_step_of
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import ConfigError


class DiLoCoOptimizer(Optimizer):
    """Trains one model together with other nodes, in the user's own loop.

        with zeroband.DiLoCoOptimizer(params=model.named_parameters(), batch_size=32, store=url) as optimizer:
            while not optimizer.is_done:
                loss_of(model, next_batch()).backward()
                optimizer.step()
                optimizer.zero_grad()

    When it is made, this node is a member of the run: it has begun it, or has fetched parameters and outer state from
    the others, so make it after the model has its values and before it is compiled into anything that copies them.
    Every `inner_steps` steps `step` takes an outer step with the nodes that are there (DiLoCo, arXiv:2311.08105), and
    waits for them. A node that the run went on without comes back within a `step`, too.

    `params`: as for torch's optimizers; with names (`model.named_parameters()`) a node whose model differs is told
    where. float32, whole on every rank of the node or cut by FSDP2. Those without requires_grad, such as the base of
    adapters, are compared at join and do not travel. What a node holds besides, such as running means of batch norms,
    stays its own.
    `batch_size`: samples of this node in one inner step, over all its ranks; a node counts by the samples it learned
    from.
    `inner_steps`: between two outer steps (H). None: 500, with SparseLoCo 30.
    `lr_scheduler`: called with the inner optimizer; follows the run's inner steps, also where this node joins late.
    None: learning rates are the loop's business. A schedule that it made over this optimizer is brought to the run's
    place before the first step of a node that joins late, and follows the steps of this node from there.
    `store`: address of the run's Redis, or of several, of which another one is gone to when the one in use dies; or
    "nodes", with `settings` that name some in "store.peers": each peer holds one. None: ZERO_BAND_STORE__URL, else
    "local": a server of this process's own, at `store_url`. An empty one is refused, and a node that was given one and
    stays alone warns.
    `inner_optimizer`: called with `params`, or an instance. None: AdamW.
    `outer_optimizer`: an element-wise optimizer of torch's, as a class or `functools.partial`, such as SGD or AdamW.
    Its moments are the run's: equal on all nodes bit for bit, fetched by joiners. None: Nesterov, lr 0.7, momentum 0.9.
    `total_steps`: inner steps after which the run is complete. None: it goes on as long as a node trains.
    `settings`: keys of a run's configuration and their values, such as {"run.id": "first-try"}; `zeroband train --help`
    lists them. Environment variables ZERO_BAND_SECTION__KEY count, too. With "ckpt.path" the run has checkpoints, from
    which {"resume": True} goes on where no node holds it any more.
    `state`: objects with `state_dict` and `load_state_dict` by name, such as {"sampler": sampler, "scaler": scaler}.
    They go into this node's part of a checkpoint, and get it back when a node of this id resumes, before this returns.

    Under torchrun the ranks of one machine are one node, and all of them make the same calls; gradients among them are
    the loop's business (DistributedDataParallel, FSDP2). Works with schedules, gradient scalers and `state_dict`, which
    is the inner optimizer's. Close it, or use it as a context manager.
    A node that comes when the run is complete `is_done` at once, with the model as it was.
    Raises ConfigError, also where the run that is there differs, with the first thing that does; RecoveryFailed where
    no node could give this one its state; StoreLost.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        params: Params | None = None,
        inner_steps: int | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        store: str | Sequence[str] | None = None,
        inner_optimizer: Optimizer | OptimizerFactory = default_inner,
        outer_optimizer: Optimizer | OptimizerFactory | None = None,
        total_steps: int | None = None,
        settings: Mapping[str, object] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("inner_steps", inner_steps), ("total_steps", total_steps)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; set 1 or more")
        options = DropInOptions(
            batch_size=batch_size,
            inner_steps=inner_steps,
            total_steps=total_steps,
            store=store,
            outer=None if outer_optimizer is None else outer_step_of(outer_optimizer),
            settings=settings or {},
            state=state or {},
            inner=None if isinstance(inner_optimizer, Optimizer) else inner_optimizer,
        )
        optimizer = build_optimizer(inner_optimizer, params)
        self._inner = ScheduledOptimizer(optimizer, lr_scheduler)
        self._session: Session | None = None
        self._has_begun = False
        """An inner step was made here."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share_state()
        self._session = Session(self._inner, options)
        self._share_state()  # what a checkpoint held of it is in other objects
        atexit.register(self._abandon)

    def _share_state(self) -> None:
        """Groups and state are the inner optimizer's own, so that a change here is a change there."""
        self.param_groups = self._inner.optimizer.param_groups
        self.state = self._inner.optimizer.state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take an inner step, and the outer step where one is due. All ranks of the node.

        `closure`: as for torch's optimizers; the loss that it gives goes into the metrics.
        Raises RunOver when this node `is_done` already; RecoveryFailed, StoreLost.
        """
        session = self._open_session
        session.begin_step()
        if not self._has_begun:
            self._has_begun = True
            for optimizer in (self, self._inner.optimizer):
                bring_up(optimizer, session.inner_step)
        if session.has_common_steps:  # by what the nodes make of the gradients, which the closure computes
            with torch.enable_grad():
                loss = None if closure is None else closure()
        else:
            loss = self._inner.optimizer.step() if closure is None else self._inner.optimizer.step(closure)
            self._inner.advance()
        session.end_step(None if loss is None else float(loss))
        self._share_state()  # the run may have gone back to a checkpoint
        return loss

    # -- where the run is ---------------------------------------------------------------------------------------

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise ConfigError("this DiLoCoOptimizer is closed; make another one to come back into the run")
        return self._session

    @property
    def is_done(self) -> bool:
        """No further step counts: the run is complete, or this node has left as it was asked to."""
        return self._session is None or self._session.is_done

    @property
    def inner_step(self) -> int:
        """Inner steps of the run behind this node, those before it joined included."""
        return self._open_session.inner_step

    @property
    def last_round(self) -> RoundReport | None:
        """The newest outer step that this node took part in: its members, weights, and digest of the outer state.

        None until a node that joined has contributed to one; it trains before that. Weights are samples; its `samples`
        are what the run deals out and `zeroband data audit` counts: inner steps.
        """
        return self._open_session.last_round

    @property
    def store_url(self) -> str:
        """Address of the run's store, for other nodes."""
        return self._open_session.store_url

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The schedule, where there is one."""
        return self._inner.schedule

    # -- what torch asks of an optimizer ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the run knows the parameters. Raises ConfigError."""
        if self._session is not None:
            raise ConfigError("parameters cannot be added to a run; make another DiLoCoOptimizer with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's. The outer state is the run's: a node gets it from the others."""
        return self._inner.state_dict()

    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportUntypedFunctionDecorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments. Learning rates stay where `lr_scheduler` is; without one they are taken over, too."""
        self._inner.load_state_dict(state_dict)
        self._share_state()

    # -- the end ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Have the next `step` hand over what this node learned since the last outer step; then it `is_done`.

        It waits for the others at most `fault.grace_s`. May be called from a signal handler, and on one rank alone.
        """
        self._open_session.ask_to_leave()

    def close(self) -> None:
        """Leave the run at once, without what was learned since the last outer step. All ranks; again does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> DiLoCoOptimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            atexit.unregister(self._abandon)
            session.close(kind, error, trace)
            del session
            gc.collect()  # a closed process group keeps its threads until nothing refers to it, and cycles do

    def _abandon(self) -> None:
        """The program ends without having closed this."""
        session, self._session = self._session, None
        if session is not None:
            session.abandon()
