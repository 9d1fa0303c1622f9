"""The hosts of one experiment: started, checked to be of one kind, replaced where one is lost.

Ray restarts nothing here. A host that is gone is gone with all its engines; whoever had some opens them on another,
and a new host is asked for in its place, which takes part as soon as the cluster has room for it.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from harness.cluster.host import KEPT_BYTES, Files, Host, Recent
from harness.errors import UserError
from harness.graph.files import parts
from harness.measure.executor import WorkerLost
from harness.measure.provenance import decisive
from harness.run.compare import changes
from harness.run.observe import Observer

__all__ = ["WAITING", "WORKING", "Fleet", "Member"]

WAITING, WORKING = 1, 1000
"""What engines weigh: those of a cell, which mostly wait for its searches, and those of a search's worker."""
START_S = 120.0
"""A host imports the harness, on a machine that may be busy starting others."""
END_S = 5.0
"""Hosts that have not put away their files by then are ended all the same."""
GLANCE_S = 1.0
"""Between two looks whether a call is still wanted."""
_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """A host as the driver sees it.

    Attributes:
        actor: Its handle.
        node: Name of its machine.
        environment: See `harness.measure.provenance.environment`.
        load: Sum of what is open on it, see `WAITING` and `WORKING`.
    """

    actor: Any
    node: str
    environment: Mapping[str, Any]
    load: int = 0


class Fleet:
    """Hosts on the cluster that Ray is connected to.

    Args:
        count: How many are wanted.
        resources: What each reserves.
        known: Environment of the machine that the results were begun on; None: the first host decides.
        observer: Is told who takes part.
    """

    def __init__(
        self, count: int, resources: Mapping[str, float], known: Mapping[str, Any] | None, observer: Observer
    ) -> None:
        self._count = count
        self._options = _options(resources)
        self._known = known
        self._observer = observer
        self._lock = threading.RLock()
        self._starting: dict[Any, Any] = {}
        self._members: list[Member] = []
        self._refused: list[Any] = []
        self._facts: dict[str, Mapping[str, Any]] = {}
        self._numbers = itertools.count()
        self._sent: Recent[Any] = Recent(KEPT_BYTES, lambda _: None)
        self.closed = False

    def start(self) -> None:
        """Start the hosts; done when all are there, or those for which the cluster has room now.

        Raises:
            UserError: Not even one can be used.
        """
        for _ in range(self._count):
            self._ask_for_one()
        fitting = min(self._count, _room(self._options))
        ray.wait(list(self._starting), num_returns=max(1, fitting), timeout=START_S)
        with self._lock:
            self._await_one()
        if len(self._members) < self._count:
            self._observer.say(
                f"{len(self._members)} of {self._count} workers: the cluster has no room for more that are like the "
                "first; others take part when they come"
            )

    def environment(self) -> Mapping[str, Any]:
        """Of the hosts, which are all alike."""
        with self._lock:
            return self._known or self._members[0].environment

    def pick(self, load: int) -> Member:
        """The host that has least to do, with so much more.

        Raises:
            UserError: There is none, and none came in time.
        """
        with self._lock:
            self._await_one()
            chosen = min(self._members, key=lambda member: member.load)
            chosen.load += load
            return chosen

    def check_reserved(self, gpus: Set[str]) -> None:
        """Whether each worker has the GPU to itself that its engines run on.

        Raises:
            UserError: Ray gives none, or a part of one: then all of a node would be timed on its first.
        """
        if gpus and self._options["num_gpus"] < 1:
            raise UserError(
                "executor.resources: engines run on a GPU, and each worker needs one to itself: resources: {GPU: 1}"
            )

    def alike(self, member: Member, benchmarkers: str, facts: Mapping[str, Any]) -> bool:
        """Whether benchmarkers are on this host what they are on the others; where they are not, it is one less.

        Args:
            benchmarkers: Which ones.
            facts: Of each, as it describes itself there.
        """
        with self._lock:
            different = list(changes(self._facts.setdefault(benchmarkers, facts), facts))
            if different and member in self._members:
                self._members.remove(member)
                self._refuse(member.actor, member.node, different)
        return not different

    def number(self) -> int:
        """A number for a session."""
        return next(self._numbers)

    def send(self, path: Path) -> tuple[str, Any]:
        """The key to a model's files, and the files in the object store, from which they travel once to each node."""
        status = path.stat()
        key = repr((str(path), status.st_size, status.st_mtime_ns))
        with self._lock:
            sent = self._sent.get(key)
            if sent is None:
                files: Files = {part.name: part.read_bytes() for part in parts(path)}
                sent = ray.put(files)
                self._sent.put(key, sent, sum(map(len, files.values())))
            return key, sent

    def call(self, member: Member, reference: Any) -> Any:
        """The value of a call.

        Raises:
            WorkerLost: The host is gone, or the fleet was closed meanwhile.
            UserError: As the host raised it, with its name.
        """
        try:
            while not ray.wait([reference], timeout=GLANCE_S)[0]:
                if self.closed:
                    raise WorkerLost("the run is being ended")
            return ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(f"{error.cause} (on {member.node})") from None
            raise
        except RayError as error:
            self._lose(member, error)
            raise WorkerLost(f"the worker on {member.node} was lost: {_first_line(error)}") from error

    def forget(self, member: Member, load: int) -> None:
        """So much of this host was closed."""
        with self._lock:
            member.load -= load

    def close(self) -> None:
        """End all hosts."""
        self.closed = True
        with self._lock:
            actors = [*(member.actor for member in self._members), *self._starting.values(), *self._refused]
            ending = [member.actor.end.remote() for member in self._members]
            self._members, self._starting = [], {}
            self._sent = Recent(KEPT_BYTES, lambda _: None)
        if ending:
            with suppress(RayError):
                ray.wait(ending, num_returns=len(ending), timeout=END_S)
        for actor in actors:
            with suppress(RayError):
                ray.kill(actor)

    def _await_one(self) -> None:
        """Take in whoever has come; where there is nobody, wait.

        Raises:
            UserError: Nobody came in time.
        """
        self._welcome(0.0)
        if not self._members:
            self._welcome(START_S)
        if not self._members or self.closed:
            raise UserError(self._nobody())

    def _ask_for_one(self) -> None:
        actor = ray.remote(Host).options(**self._options).remote(sys.path)
        self._starting[actor.facts.remote(None)] = actor

    def _welcome(self, patience_s: float) -> None:
        """Take in the hosts that are ready; wait for one where there is patience."""
        while self._starting:
            ready, _ = ray.wait(list(self._starting), num_returns=1, timeout=patience_s)
            if not ready:
                return
            actor = self._starting.pop(ready[0])
            try:
                facts = ray.get(ready[0])
            except RayError as error:  # it died, cannot be placed, or has no harness to import
                self._observer.say(f"a worker could not be started: {_first_line(error)}")
                with suppress(RayError):
                    ray.kill(actor)
                continue
            if facts["niceness"] > 0:
                self._observer.say(
                    f"the worker on {facts['node']} yields to everything else there (niceness {facts['niceness']}): "
                    "start its node with RAY_worker_niceness=0 in the environment"
                )
            if self._known is None:
                self._known = facts["environment"]
            different = list(changes(decisive(self._known), decisive(facts["environment"])))
            if different:
                self._refuse(actor, facts["node"], different)
            else:
                self._members.append(Member(actor=actor, node=facts["node"], environment=facts["environment"]))
                patience_s = 0.0

    def _refuse(self, actor: Any, node: str, different: Sequence[str]) -> None:
        """A host that is not like the others: figures of different devices or libraries are never compared raw."""
        shown = "\n".join(f"  {line}" for line in different)
        self._observer.say(f"the worker on {node} is refused, for it differs from the baseline's:\n{shown}")
        self._refused.append(actor)  # and kept: its device is taken, so the next host comes elsewhere
        self._ask_for_one()

    def _lose(self, member: Member, error: RayError) -> None:
        with self._lock:
            if member not in self._members:
                return
            self._members.remove(member)
            left = len(self._members)
            self._ask_for_one()
        with suppress(RayError):
            ray.kill(member.actor)
        self._observer.say(f"the worker on {member.node} was lost ({_first_line(error)}); {left} left")

    def _nobody(self) -> str:
        wanted, there = _wanted(self._options), ray.cluster_resources()
        offered = {name: there.get(name, 0) for name in wanted}
        refused = f"; {len(self._refused)} were refused" if self._refused else ""
        return (
            f"executor: no worker can be used: each asks for {_shown(wanted)}, the cluster has {_shown(offered)} in "
            f"all{refused}; everything measured before is safe: add nodes, then run the same command again to go on"
        )


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """What Ray calls them; SPREAD puts hosts on as many nodes as there are."""
    own = dict(resources)
    return {
        "num_cpus": own.pop("CPU", 0 if own else 1),
        "num_gpus": own.pop("GPU", 0),
        "resources": own,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": "SPREAD",
    }


def _wanted(options: Mapping[str, Any]) -> dict[str, float]:
    wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    return {name: amount for name, amount in wanted.items() if amount}


def _room(options: Mapping[str, Any]) -> int:
    """How many hosts the nodes could take, one by one."""
    wanted = _wanted(options)
    nodes: Sequence[Mapping[str, Any]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min((int(node.get(name, 0) // amount) for name, amount in wanted.items()), default=1) for node in nodes)


def _shown(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
