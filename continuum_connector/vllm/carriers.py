"""What carries our messages through vLLM: metadata down with a step, a report up from a rank."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from continuum_connector.messages import StepPlan, WorkerReport


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries the step plan down."""

    plan: StepPlan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries a rank's report up; vLLM adds up the reports of all ranks with `aggregate`."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        self.report.merge(other.report)
        return self
