"""vLLM's connector for hidden states, on a server without CUDA: its example copies with CUDA events and streams.

    --kv-transfer-config '{"kv_connector": "CpuStates", "kv_connector_module_path": "cpu_states", ...}'

with the folder of this file in PYTHONPATH. Files, locks and names are those of the example.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _Done:
    """A copy that has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStates(example.ExampleHiddenStatesConnector):
    """The example, with a copy of the states where it has a stream."""

    def _submit_async_write(self, pending: example.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, _Done(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = _Done()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))
