"""Snakemake's storage plugin: `default-storage-provider: surgetank` in a profile runs the workflow on Surgetank's mount.

Other storage plugins copy files to and from the storage. This one copies nothing: below the mount the same paths are the fast ones.
Snakemake treats them as its own local files, with all its features. Snakemake makes the provider before anything else. The provider
starts the same command again inside `surgetank run`, without a default storage provider. There Snakemake imports all its storage
plugins, and this module sends hints from the graph (`surgetank.workflow.engines.snakemake`). Every Snakemake of the environment imports
this module, so it does nothing unless the user requests it.
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

# The directory in which Snakemake was started: it changes to its `--directory` before it makes the provider.
_STARTED_IN = os.getcwd()


@dataclass
class StorageProviderSettings(StorageProviderSettingsBase):  # type: ignore[misc, unused-ignore]
    # Snakemake makes an option of the annotation: it must be a type and not text, so `__future__` annotations must not be used here.
    persist: Optional[str] = field(  # noqa: UP045
        default="all",
        metadata={
            "help": "What goes to the store: all (default; every file that is not declared temp()), final (results only: files between jobs are"
            " removed after their last reader), when-consumed (like all; a job's outputs when all jobs that read them are done)."
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
                    remedy="put `default-storage-provider: surgetank` into the profile instead of storage.surgetank(…)",
                )
            snakemake.enter(self.settings.persist, _STARTED_IN)
        except Problem as problem:
            raise WorkflowError(str(problem)) from None

    @classmethod
    def example_queries(cls) -> list[ExampleQuery]:
        return [ExampleQuery("results/{sample}.txt", "a path of the project, as without Surgetank", QueryType.ANY)]

    @classmethod
    def is_valid_query(cls, query: str) -> StorageQueryValidationResult:
        # Snakemake must not offer this plugin URLs without a named provider: the plugin serves the project's own paths.
        return StorageQueryValidationResult(query, False, "Surgetank is for default-storage-provider only")

    def use_rate_limiter(self) -> bool:
        return False

    def rate_limiter_key(self, query: str, operation: Any) -> Any:
        return None

    def default_max_requests_per_second(self) -> float:
        return 0.0


class StorageObject(StorageObjectRead, StorageObjectWrite):  # type: ignore[misc, unused-ignore]
    """Never instantiated (its methods stay abstract): Snakemake checks that a default provider can read and write."""


if (_persist := os.environ.pop("SURGETANK_SNAKEMAKE", None)) is not None:
    from surgetank.workflow.engines import snakemake

    snakemake.observe(_persist)
