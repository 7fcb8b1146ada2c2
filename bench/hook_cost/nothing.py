"""A connector that does nothing: what vLLM itself spends on having one, whichever it is."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class NothingConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler half of one; the harness has no worker half."""

    requires_kv_delivery = False

    def get_num_new_matched_tokens(self, _request: Any, _num_computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, _request: Any, _blocks: Any, _num_external: int) -> None:
        return None

    def build_connector_meta(self, _scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, _request: Any, _block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def wait_for_layer_load(self, _layer_name: str) -> None:
        return None

    def save_kv_layer(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None
