"""Snakemake's way in: `default-storage-provider: surgetank` in a profile runs the workflow on Surgetank's mount.

Nothing is copied to and fro, as with other storage: below the mount the same paths are the fast ones, so files stay Snakemake's own,
with all that it can do with them. Snakemake makes the provider before anything else; that starts the same command again inside `surgetank
run`, without a default storage provider, and there, as Snakemake imports all its storage plugins, this module tells it what
the graph knows (`surgetank.workflow.engines.snakemake`). Every Snakemake of the environment imports this: nothing happens
unless it is asked for.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Optional

from snakemake_interface_common.exceptions import WorkflowError  # type: ignore[import-untyped, unused-ignore]
from snakemake_interface_storage_plugins.settings import (  # type: ignore[import-untyped, unused-ignore]
    StorageProviderSettingsBase,
)
from snakemake_interface_storage_plugins.storage_object import (  # type: ignore[import-untyped, unused-ignore]
    StorageObjectRead,
    StorageObjectWrite,
)
from snakemake_interface_storage_plugins.storage_provider import (  # type: ignore[import-untyped, unused-ignore]
    ExampleQuery,
    QueryType,
    StorageProviderBase,
    StorageQueryValidationResult,
)

# Where Snakemake was started: it has gone to its `--directory` when the provider is made.
_STARTED_IN = os.getcwd()


@dataclass
class StorageProviderSettings(StorageProviderSettingsBase):  # type: ignore[misc, unused-ignore]
    # Snakemake makes an option of the annotation: it has to be a type and no text, so nothing of `__future__` here.
    persist: Optional[str] = field(  # noqa: UP045
        default="all",
        metadata={
            "help": "What goes to the store: all (default; not what is declared temp()), final (not what jobs only read of"
            " each other either: removed after its last reader), when-consumed (all, a job's outputs when all jobs that read them are done)."
        },
    )


class StorageProvider(StorageProviderBase):  # type: ignore[misc, unused-ignore]
    def __post_init__(self) -> None:
        from surgetank.workflow.engines import snakemake
        from surgetank.workflow.problem import Problem

        try:
            if not self.is_default:
                raise Problem(
                    "Surgetank serves the whole directory, not single files",
                    remedy="instead of storage.surgetank(…): `default-storage-provider: surgetank` in the profile",
                )
            snakemake.enter(self.settings.persist, _STARTED_IN)
        except Problem as problem:
            raise WorkflowError(str(problem)) from None

    @classmethod
    def example_queries(cls) -> list[ExampleQuery]:
        return [ExampleQuery("results/{sample}.txt", "a path of the project, as without Surgetank", QueryType.ANY)]

    @classmethod
    def is_valid_query(cls, query: str) -> StorageQueryValidationResult:
        # Whose URL has no provider named is not to be offered us: we serve the project's own paths.
        return StorageQueryValidationResult(query, False, "Surgetank is for default-storage-provider only")

    def use_rate_limiter(self) -> bool:
        return False

    def rate_limiter_key(self, query: str, operation: Any) -> Any:
        return None

    def default_max_requests_per_second(self) -> float:
        return 0.0


class StorageObject(StorageObjectRead, StorageObjectWrite):  # type: ignore[misc, unused-ignore]
    """Never made (its methods stay abstract): Snakemake wants to see that a default provider reads and writes."""


if (_persist := os.environ.pop("SURGETANK_SNAKEMAKE", None)) is not None:
    from surgetank.workflow.engines import snakemake

    snakemake.observe(_persist)
