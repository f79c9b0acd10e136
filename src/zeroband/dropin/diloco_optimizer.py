"""`zeroband.DiLoCoOptimizer`: a torch optimizer that includes a run's outer steps."""

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
    build_optimizer,
    default_inner,
    move_schedulers,
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

    The constructor makes this node a member of the run: it starts the run, or fetches parameters and outer state from
    its peers. Call it after initialising the model, and before compiling anything that copies the parameters. Every
    `inner_steps` steps, `step` takes an outer step with the present nodes (DiLoCo, arXiv:2311.08105), and waits for
    them. A node that lost the run rejoins it within a `step`.

    `params`: as for torch's optimizers. With names (`model.named_parameters()`), an error names the parameters that
    differ from the run's. float32, whole on every rank of the node or sharded by FSDP2. Parameters without
    requires_grad, such as the base of adapters, are compared at join and never exchanged. Other state, such as running
    means of batch norms, stays local.
    `batch_size`: samples of this node in one inner step, over all its ranks; a node's weight is its samples.
    `inner_steps`: inner steps between outer steps (H). None: 500, with SparseLoCo 30.
    `lr_scheduler`: called with the inner optimizer; follows the run's inner steps, also on a node that joins late.
    None: the loop sets learning rates. A scheduler that the loop creates over this optimizer is moved to the run's step
    before the first step of a late node.
    `store`: address of the run's Redis, or of several, of which one is in use; or "nodes", with peers named in
    `settings` as "store.peers": each peer holds a store. None: ZERO_BAND_STORE__URL, else "local": a server in this
    process, at `store_url`. An empty address is refused; a node without peers at its store logs a warning.
    `inner_optimizer`: called with `params`, or an instance. None: AdamW.
    `outer_optimizer`: an element-wise torch optimizer, as a class or `functools.partial`, such as SGD or AdamW. Its
    moments belong to the run: bit-identical on all nodes, and fetched by joiners. None: Nesterov, lr 0.7, momentum 0.9.
    `total_steps`: inner steps of the whole run. None: no end.
    `settings`: configuration keys and values, such as {"run.id": "first-try"}; `zeroband train --help` lists them.
    Environment variables ZERO_BAND_SECTION__KEY apply as well. With "ckpt.path" the run has checkpoints, and
    {"resume": True} resumes from them if no node has the run's state.
    `state`: objects with `state_dict` and `load_state_dict` by name, such as {"sampler": sampler, "scaler": scaler}.
    Checkpoints include them; the constructor restores them when a node of this id resumes.

    Under torchrun the ranks of one machine are one node. All of them make the same calls, and the loop reduces
    gradients among them (DistributedDataParallel, FSDP2). Supports schedulers, gradient scalers and `state_dict`, which
    is the inner optimizer's. Close it, or use it as a context manager. On a node that comes after the end of the run,
    `is_done` is true at once, and the model is unchanged.
    Raises ConfigError, also with the first difference from the run's settings; RecoveryFailed if no node can provide
    the state; StoreLost.
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
        """Whether this node has made an inner step."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share_state()
        self._session = Session(self._inner, options)
        self._share_state()  # loading a checkpoint replaces the state's objects
        atexit.register(self._abandon)

    def _share_state(self) -> None:
        """Share groups and state with the inner optimizer, so that changes apply to both."""
        self.param_groups = self._inner.optimizer.param_groups
        self.state = self._inner.optimizer.state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take an inner step, and the outer step that is due. All ranks of the node.

        `closure`: as for torch's optimizers; its loss is part of the metrics. Raises RunOver if `is_done`;
        RecoveryFailed, StoreLost.
        """
        session = self._open_session
        session.begin_step()
        if not self._has_begun:
            self._has_begun = True
            for optimizer in (self, self._inner.optimizer):
                move_schedulers(optimizer, session.inner_step)
        if session.has_common_steps:  # `end_step` steps by the nodes' common gradient
            with torch.enable_grad():
                loss = None if closure is None else closure()
        else:
            loss = self._inner.optimizer.step() if closure is None else self._inner.optimizer.step(closure)
            self._inner.advance()
        session.end_step(None if loss is None else float(loss))
        self._share_state()  # a rollback replaces the state's objects
        return loss

    # -- the run's progress -------------------------------------------------------------------------------------

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise ConfigError("this DiLoCoOptimizer is closed; make another one to rejoin the run")
        return self._session

    @property
    def is_done(self) -> bool:
        """Whether further steps do not count: the run is complete, or this node has left as it was asked to."""
        return self._session is None or self._session.is_done

    @property
    def inner_step(self) -> int:
        """Inner steps of the run so far, including those before this node joined."""
        return self._open_session.inner_step

    @property
    def last_round(self) -> RoundReport | None:
        """The latest outer step with this node: its members, weights, and digest of the outer state.

        None until a joiner has contributed to one. Weights are samples; `samples` counts inner steps, which the run
        deals out and `zeroband data audit` counts.
        """
        return self._open_session.last_round

    @property
    def store_url(self) -> str:
        """Address of the run's store, for other nodes."""
        return self._open_session.store_url

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The scheduler, if there is one."""
        return self._inner.schedule

    # -- torch.optim.Optimizer -----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new parameters once the node is in a run. Raises ConfigError."""
        if self._session is not None:
            raise ConfigError("parameters cannot be added to a run; make another DiLoCoOptimizer with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state. The outer state belongs to the run."""
        return self._inner.state_dict()

    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportUntypedFunctionDecorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the moments, and the learning rates unless there is an `lr_scheduler`."""
        self._inner.load_state_dict(state_dict)
        self._share_state()

    # -- shutdown ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Make the next `step` hand over this node's latest update; then `is_done`.

        It waits for the others at most `fault.grace_s`. Safe in a signal handler, and on a single rank.
        """
        self._open_session.ask_to_leave()

    def close(self) -> None:
        """Leave the run at once, without the update since the last outer step. All ranks; idempotent."""
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
            gc.collect()  # reference cycles keep closed process groups and their threads alive

    def _abandon(self) -> None:
        """Clean up at the end of a program that did not close this."""
        session, self._session = self._session, None
        if session is not None:
            session.abandon()
