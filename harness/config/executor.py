"""Where engines are built and timed, and how many at once: the key `executor` of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["ExecutorSpec"]


class ExecutorSpec(BaseModel):
    """Where engines are built and timed, and how many at once.

    Attributes:
        use: "local": processes of this machine; "ray": a Ray cluster, each worker with a device of its own.
        workers: At most so many candidates are under way at once.
        window: Proposals of one search that may await their outcomes; None: half as many again as it has workers,
            and 1 where it has one. Searchers know less when they ask where it is wider.
        searches: Searches of a cell that run at once and share the workers.
        cells: Cells that run at once; with Ray alone.
        timing: "alternate": on this machine nothing is built while an engine is timed; "beside": builds go on.
        address: Of the Ray cluster; "auto": the one that this machine belongs to, "local": a new one.
        resources: What each Ray worker reserves, for instance {GPU: 1} or {CPU: 8}; default one CPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    use: Literal["local", "ray"] = "local"
    workers: Annotated[int, Field(ge=1, le=10_000)] = 1
    window: Annotated[int, Field(ge=1)] | None = None
    searches: Annotated[int, Field(ge=1, le=1_000)] = 1
    cells: Annotated[int, Field(ge=1, le=1_000)] = 1
    timing: Literal["alternate", "beside"] = "alternate"
    address: str = "auto"
    resources: dict[str, Annotated[float, Field(ge=0, strict=False)]] = {}

    @property
    def max_pending(self) -> int:
        """Proposals of one search that may await their outcomes."""
        return self.window or max(1, 3 * self.workers // (2 * self.searches * self.cells))

    @model_validator(mode="after")
    def _check_target(self) -> ExecutorSpec:
        if self.use == "local":
            for name in ("cells", "address", "resources"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: of the executor 'ray' alone, but use is 'local'")
        elif self.timing == "beside":
            raise ValueError("timing: of the executor 'local' alone; a Ray worker has its device to itself")
        return self
