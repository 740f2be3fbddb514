"""mkd/compat/data_iterator.py, and that megatron-core 0.19 still needs it."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from mkd.compat.data_iterator import keep_random_state, peek


def test_peeked_samples_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's iterator stores every sample that is read from it, so samples peeked above it would be replayed."""
    from megatron.core import rerun_state_machine

    machine = SimpleNamespace(get_mode=lambda: rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    source = rerun_state_machine.RerunDataIterator(iter(range(5)))
    assert [next(source), next(source)] == [0, 1] and source.saved_microbatches == [0, 1]
    assert peek(source, 2) == [2, 3] and source.saved_microbatches == [0, 1]
    source.rewind()
    assert [next(source), next(source)] == [0, 1] and peek(source, 2) == [2, 3]
    source.advance()
    assert next(source) == 2 and peek(source, 9) == [3, 4] and peek(source, 1) == [3]
    assert [next(source), next(source)] == [3, 4] and peek(source, 1) == []
    assert peek(iter(range(3)), 2) == []


def test_iterators_leave_the_random_state_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU; they begin after a resumed job has read the state. A loader of torch by itself changes it."""
    from megatron.training import training

    def changes(loader: DataLoader) -> bool:
        before = torch.get_rng_state()
        assert list(loader) == [3]
        return not torch.equal(torch.get_rng_state(), before)

    monkeypatch.setattr(training, "build_pretraining_data_loader", lambda rows, _: rows and DataLoader(rows))
    assert changes(training.build_pretraining_data_loader([3], 0))
    keep_random_state()
    assert not changes(training.build_pretraining_data_loader([3], 0))
    assert training.build_pretraining_data_loader(None, 0) is None


def test_upstream_asserts_that_samples_are_left_for_a_finished_job() -> None:
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    with pytest.raises(AssertionError, match="no samples left to consume"):
        MegatronPretrainingSampler(8, 8, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1)
