"""Every evaluation reads the same samples."""

import pytest
from megatron.core.datasets.utils import Split

from mkd.data.datasets import SameSamples, provider_of


class Numbers:
    split = Split.valid

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return 10 * index


def test_evaluations_read_the_same_samples() -> None:
    samples = SameSamples(Numbers(), period=3)
    assert [samples[i] for i in range(7)] == [0, 10, 20, 0, 10, 20, 0]
    assert len(samples) % 3 == 0
    assert len(samples) >= 300_000
    assert samples.split == Split.valid


def test_a_set_shorter_than_an_evaluation_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="7 samples, 8 required"):
        SameSamples(Numbers(), period=8)


def test_later_virtual_stages_get_no_data() -> None:
    provider = provider_of([1, 2, 3])
    assert provider((1, 1, 1)) == provider((1, 1, 1), vp_stage=0) == [1, 2, 3]
    assert provider((1, 1, 1), vp_stage=1) == [None, None, None]
