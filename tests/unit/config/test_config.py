"""KDConfig, LossSpec and Schedule: what they compute and what they refuse."""

import dataclasses
import math
from typing import get_args

import pytest

from mkd.config.kd_config import KDConfig
from mkd.config.loss_spec import Divergence, LossSpec
from mkd.config.schedules import Schedule
from mkd.config.values import LayerPair
from mkd.errors import MkdConfigError

SERVED = {"teacher_hf": None, "teacher_url": ["tcp://a:1"]}
SCORED = {"teacher_hf": None, "teacher_url": ["http://a:1"], "top_k": 8}
SAMPLED = {"teacher_targets": "sampled", "teacher_samples": 8}
STATES = {"teacher_states_dir": "D", "teacher_head_hf": "F"}


def config(**changes: object) -> KDConfig:
    return KDConfig(**{"teacher_hf": ["teacher"], "ratio": 0.5, **changes})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"teacher_hf": None}, ["none", "--kd-teacher-hf", "--kd-teacher-load"]),
        ({"teacher_load": "other"}, ["--kd-teacher-hf teacher", "--kd-teacher-load other"]),
        (
            {"teacher_url": ["tcp://a:1", "tcp://b:1"]},
            ["--kd-teacher-hf teacher and --kd-teacher-url tcp://a:1 tcp://b:1"],
        ),
        ({"teacher_ahead": 3}, ["--kd-teacher-ahead is 3", "give --kd-teacher-url"]),
        ({**SERVED, "hidden_loss": "1:1"}, ["--kd-hidden-loss does not work with --kd-teacher-url tcp://a:1"]),
        ({**SERVED, "xtoken_loss": "gold"}, ["--kd-xtoken-loss is gold", "--kd-teacher-tokenizer DIR"]),
        ({**SERVED, "teacher_tokenizer": ["T"]}, ["--kd-teacher-tokenizer is T", "needs --kd-xtoken-loss"]),
        ({"teacher_tokenizer": ["T"]}, ["--kd-teacher-tokenizer is T", "no teacher is served"]),
        ({**SERVED, "teacher_dtype": "bf16"}, ["--kd-teacher-dtype", "give it to mkd serve-teacher"]),
        ({**SERVED, "teacher_offload": True}, ["--kd-teacher-offload", "leave it out"]),
        ({**SERVED, "teacher_context_parallel_size": 2}, ["size 2 does not work with --kd-teacher-url tcp://a:1"]),
        ({**SERVED, "teacher_micro_batch_size": 8}, ["size 8 does not work with --kd-teacher-url", "--batch"]),
        ({"teacher_micro_batch_size": 8, "hidden_loss": "1:1"}, ["size 8 does not work with --kd-hidden-loss 1:1"]),
        ({"teacher_micro_batch_size": 0}, ["--kd-teacher-micro-batch-size is 0"]),
        ({**SERVED, "teacher_timeout": 0.0}, ["--kd-teacher-timeout is 0.0"]),
        ({**SERVED, "teacher_url": ["tcp://a:1", "tcp://a:1"]}, ["has an address twice"]),
        ({**SERVED, "teacher_api": "vllm"}, ["--kd-teacher-api is vllm", "tcp://a:1 is not an http address"]),
        ({**SERVED, "teacher_cache": "C"}, ["--kd-teacher-cache C and --kd-teacher-url tcp://a:1"]),
        ({"teacher_targets": "top_k"}, ["--kd-teacher-targets is top_k", "give --kd-teacher-url"]),
        ({**SERVED, "teacher_targets": "top"}, ["--kd-teacher-targets is 'top'", "hidden_states"]),
        ({**SERVED, "teacher_targets": "top_k"}, ["--kd-teacher-targets is top_k", "give --kd-top-k K"]),
        ({**SCORED, "teacher_targets": "top_k"}, ["--kd-teacher-targets is top_k", "http://a:1", "leave it out"]),
        (
            {**SERVED, "teacher_targets": "top_k", "top_k": 4, "temperature_schedule": "linear:1:2:9"},
            ["--kd-teacher-targets is top_k", "a constant --kd-temperature", "renormalize"],
        ),
        (
            {
                **SERVED,
                "teacher_url": ["tcp://a:1", "tcp://b:1"],
                **{"teacher_targets": "top_k", "top_k": 4, "teachers_mode": "averaged_logits"},
            },
            ["--kd-teacher-targets is top_k", "--kd-teachers-mode averaged_logits"],
        ),
        (
            {**SERVED, "teacher_targets": "sampled"},
            ["--kd-teacher-samples is None", "give --kd-teacher-targets sampled"],
        ),
        ({**SERVED, "teacher_samples": 8}, ["--kd-teacher-targets is hidden_states", "--kd-teacher-samples is 8"]),
        ({**SERVED, **SAMPLED, "teacher_samples": 4096}, ["--kd-teacher-samples is 4096", "at most 4095"]),
        ({**SERVED, **SAMPLED, "loss": "jsd"}, ["forward_kl only, not --kd-loss jsd"]),
        ({**SERVED, **SAMPLED, "top_k": 8}, ["does not work with --kd-top-k 8"]),
        ({**SERVED, **SAMPLED, "temperature_schedule": "linear:1:2:9"}, ["a constant --kd-temperature"]),
        ({"teacher_api": "sglang"}, ["--kd-teacher-api is sglang", "give --kd-teacher-url"]),
        ({**SCORED, "teacher_api": "mkd"}, ["--kd-teacher-api is mkd", "give tcp://HOST:PORT"]),
        ({**SCORED, "teacher_api": "tgi"}, ["--kd-teacher-api is 'tgi'", "vllm"]),
        ({**SERVED, "teacher_url": ["a:1"]}, ["--kd-teacher-url a:1 begins with none of", "http://HOST:PORT for vLLM"]),
        ({**SCORED, "teacher_url": ["http://a:1", "tcp://b:1"]}, ["addresses of two kinds"]),
        ({**SCORED, "teacher_url": ["http://a:1", "ipc:///b/c"]}, ["addresses of two kinds"]),
        ({**SCORED, "top_k": None}, ["http://a:1 is an inference server", "--kd-top-k K", "--max-logprobs K"]),
        ({**SCORED, "teacher_cache": "C", "cache_missing": "ce_only"}, ["--kd-cache-missing is ce_only"]),
        (
            {**SCORED, **STATES, "teacher_head_hf": None},
            ["states-dir is D", "--kd-teacher-head-hf is None"],
        ),
        ({**SCORED, **STATES, "teacher_states_dir": None}, ["--kd-teacher-states-dir is None", "give both"]),
        ({**SCORED, **STATES, "teacher_api": "sglang"}, ["--kd-teacher-states-dir is D", "not with SGLang"]),
        ({**SCORED, **STATES, "teacher_cache": "C"}, ["--kd-teacher-cache is C", "caches have no hidden states"]),
        ({**SCORED, **STATES, "xtoken_loss": "gold"}, ["--kd-xtoken-loss", "leave it out"]),
        ({**SERVED, **STATES}, ["--kd-teacher-states-dir is D", "not with --kd-teacher-url tcp://a:1"]),
        (STATES, ["--kd-teacher-states-dir is D", "give --kd-teacher-url"]),
        ({**SCORED, "temperature": 2.0}, ["T = 1 only", "--kd-top-k-tail renormalize"]),
        ({**SCORED, "temperature_schedule": "linear:1:2:9"}, ["T = 1 only"]),
        ({**SCORED, "hidden_loss": "1:1"}, ["--kd-hidden-loss does not work with --kd-teacher-url http://a:1"]),
        ({"ratio": None}, ["--kd-ratio is required"]),
        ({"ratio": 1.5}, ["--kd-ratio is 1.5", "[0, 1]"]),
        ({"ratio": -0.1}, ["--kd-ratio is -0.1"]),
        ({"ratio": math.nan}, ["--kd-ratio is nan"]),
        ({"ratio_schedule": "linear:0:1:10"}, ["--kd-ratio 0.5", "linear:0:1:10"]),
        ({"ratio": None, "ratio_schedule": "linear:0:2:10"}, ["END of --kd-ratio-schedule is 2.0"]),
        ({"ratio": None, "ratio_schedule": "linear:-1:1:10"}, ["START of --kd-ratio-schedule is -1.0"]),
        ({"teacher_weights": [1.0]}, ["are for several teachers, and there is one"]),
        ({"teachers_mode": "averaged_logits"}, ["are for several teachers"]),
        ({"teacher_hf": ["A", "B"], "teachers_mode": "mean"}, ["--kd-teachers-mode is 'mean'"]),
        ({"teacher_hf": ["A", "B"], "teacher_weights": [1.0]}, ["--kd-teacher-weights are 1; 2 teachers need 2"]),
        ({"teacher_hf": ["A", "B"], "teacher_weights": [1.0, 0.0]}, ["--kd-teacher-weights are 1 0"]),
        ({"teacher_hf": ["A", "B"], "hidden_loss": "1:1"}, ["--kd-hidden-loss is 1:1", "there are 2"]),
        ({"xtoken_loss": "pkl"}, ["--kd-xtoken-loss is 'pkl'", "did you mean 'p_kl'?"]),
        ({"projection": "file"}, ["--kd-projection is file", "give --kd-xtoken-loss"]),
        ({"teacher_seq_length": 64}, ["--kd-teacher-seq-length is 64", "give --kd-xtoken-loss"]),
        ({"xtoken_loss": "gold", "teacher_seq_length": 0}, ["--kd-teacher-seq-length is 0"]),
        ({"xtoken_loss": "gold", "hidden_loss": "1:1"}, ["--kd-hidden-loss 1:1 does not work with it"]),
        ({"xtoken_loss": "gold", "loss_impl": "reference"}, ["--kd-loss-impl reference"]),
        ({"balance": True, "ratio": 1.0}, ["--kd-balance", "R = 1"]),
        ({"balance": True, "ratio": 0.0}, ["--kd-balance", "R = 0"]),
        ({"balance": True, "ratio": None, "ratio_schedule": "linear:0:1:9"}, ["--kd-balance", "linear from 0 to 1"]),
        ({"temperature": 0.0}, ["--kd-temperature is 0.0", "> 0"]),
        ({"temperature": -1.0}, ["--kd-temperature is -1.0"]),
        ({"temperature": math.inf}, ["--kd-temperature is inf"]),
        ({"temperature": math.nan}, ["--kd-temperature is nan"]),
        ({"temperature": 2.0, "temperature_schedule": "linear:4:1:10"}, ["--kd-temperature 2.0", "linear:4:1:10"]),
        ({"temperature_schedule": "linear:4:0:10"}, ["END of --kd-temperature-schedule is 0.0"]),
        ({"temperature_schedule": "cosine:0:4:10"}, ["START of --kd-temperature-schedule is 0.0"]),
        ({"loss": "kl"}, ["--kd-loss is 'kl'", *map(repr, get_args(Divergence))]),
        ({"loss": "forward-kl"}, ["--kd-loss is 'forward-kl'", "did you mean 'forward_kl'?"]),
        ({"loss": "jsd", "beta": 0.0}, ["--kd-beta is 0.0", "0 < beta < 1", "--kd-loss forward_kl"]),
        ({"loss": "jsd", "beta": 1.0}, ["--kd-beta is 1.0", "0 < beta < 1", "--kd-loss reverse_kl"]),
        ({"loss": "jsd", "beta": -0.5}, ["--kd-beta is -0.5"]),
        ({"loss": "jsd", "beta": 1.5}, ["--kd-beta is 1.5"]),
        ({"loss": "jsd", "beta": math.nan}, ["--kd-beta is nan"]),
        ({"loss": "forward_kl", "beta": 0.3}, ["--kd-beta is 0.3", "--kd-loss forward_kl does not", "--kd-loss jsd"]),
        ({"loss": "jsd", "skew": 0.3}, ["--kd-skew is 0.3", "--kd-loss jsd does not", "skew_forward_kl or skew_rev"]),
        ({"loss": "tvd", "skew": math.nan}, ["--kd-skew is nan", "--kd-loss tvd does not"]),
        ({"loss": "skew_forward_kl", "skew": 1.0}, ["--kd-skew is 1.0", "0 <= skew < 1"]),
        ({"loss": "skew_reverse_kl", "skew": -0.1}, ["--kd-skew is -0.1", "0 <= skew < 1"]),
        ({"loss": "skew_reverse_kl", "skew": math.nan}, ["--kd-skew is nan"]),
        ({"loss": "skew_forward_kl", "skew": math.inf}, ["--kd-skew is inf"]),
        ({"loss": "skew_forward_kl", "beta": 0.3}, ["--kd-beta is 0.3", "--kd-loss skew_forward_kl does not"]),
        ({"z_loss": -1e-4}, ["--kd-z-loss is -0.0001", ">= 0"]),
        ({"z_loss": math.inf}, ["--kd-z-loss is inf", "finite"]),
        ({"z_loss": math.nan}, ["--kd-z-loss is nan", "finite"]),
        ({"z_loss": 1e-4, "ratio": 1.0}, ["--kd-z-loss is 0.0001", "R = 1", "--kd-ratio"]),
        ({"z_loss": 1e-4, "ratio": None, "ratio_schedule": "linear:1:1:9"}, ["--kd-z-loss is 0.0001", "R = 1"]),
        ({"z_loss": 1e-4, "ratio": 0.0}, ["--kd-z-loss is 0.0001", "R = 0", "--kd-ratio"]),
        ({"hidden_loss": ""}, ["--kd-hidden-loss is ''", "'' is not a pair", "4:8,8:16"]),
        ({"hidden_loss": "1:2,3"}, ["--kd-hidden-loss is '1:2,3'", "'3' is not a pair"]),
        ({"hidden_loss": "1:2:3"}, ["'1:2:3' is not a pair"]),
        ({"hidden_loss": "1:2,"}, ["--kd-hidden-loss is '1:2,'", "'' is not a pair"]),
        ({"hidden_loss": "-1:2"}, ["'-1:2' is not a pair"]),
        ({"hidden_loss": "1:b"}, ["'1:b' is not a pair"]),
        ({"hidden_loss": "1:2,2:3,1:2"}, ["--kd-hidden-loss is '1:2,2:3,1:2'", "pair 1:2", "twice"]),
        ({"hidden_loss": "1:2", "hidden_loss_weight": 0.0}, ["--kd-hidden-loss-weight is 0.0", "> 0"]),
        ({"hidden_loss": "1:2", "hidden_loss_weight": -1.0}, ["--kd-hidden-loss-weight is -1.0"]),
        ({"hidden_loss": "1:2", "hidden_loss_weight": math.nan}, ["--kd-hidden-loss-weight is nan"]),
        ({"hidden_loss": "1:2", "hidden_loss_type": "l2"}, ["--kd-hidden-loss-type is 'l2'", "'mse', 'cosine'"]),
        ({"hidden_loss_weight": 2.0}, ["--kd-hidden-loss-weight is 2.0", "--kd-hidden-loss S:T"]),
        ({"hidden_loss_type": "cosine"}, ["--kd-hidden-loss-type is cosine", "--kd-hidden-loss S:T"]),
        ({"hidden_loss": "1:2", "ratio": 0.0}, ["--kd-hidden-loss is 1:2", "--kd-ratio", "R = 0"]),
        (
            {"hidden_loss": "1:2", "ratio": None, "ratio_schedule": "linear:0:0:9"},
            ["--kd-hidden-loss is 1:2", "--kd-ratio-schedule", "R = 0"],
        ),
        ({"logits_dtype": "fp16"}, ["--kd-logits-dtype is 'fp16'", "'auto', 'bf16', 'fp32'"]),
        ({"loss_impl": "cuda"}, ["--kd-loss-impl is 'cuda'", "'auto', 'reference', 'eager', 'triton'"]),
        ({"loss_chunk_rows": 0}, ["--kd-loss-chunk-rows is 0"]),
    ],
)
def test_refused(changes: dict, words: list[str]) -> None:
    with pytest.raises(MkdConfigError) as error:
        config(**changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["linear", "linear:0:1", "linear:0:1:2:3", "linear:a:1:2", "linear:0:1:0", "linear:0:1:1.5", "step:0:1:2", ""],
)
def test_schedule_text_refused(text: str) -> None:
    with pytest.raises(MkdConfigError, match="--kd-ratio-schedule") as error:
        config(ratio=None, ratio_schedule=text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_end_points_of_ratio_are_legal(ratio: float) -> None:
    assert config(ratio=ratio).ratio_over_time.value(123) == ratio


def test_linear_schedule() -> None:
    schedule = Schedule.parse("--kd-ratio-schedule", "linear:1:0.5:10")
    assert [schedule.value(i) for i in (0, 5, 10, 1000)] == [1.0, 0.75, 0.5, 0.5]


def test_cosine_schedule() -> None:
    schedule = Schedule.parse("--kd-ratio-schedule", "cosine:0:2:4")
    expected = [0.0, 1 - math.sqrt(0.5), 1.0, 1 + math.sqrt(0.5), 2.0, 2.0]
    assert [schedule.value(i) for i in range(6)] == pytest.approx(expected, abs=1e-12)


def test_schedules_reach_the_loss_spec() -> None:
    c = config(
        ratio=None, ratio_schedule="linear:0:1:4", temperature_schedule="linear:4:2:2", temperature_squared=False
    )
    assert c.ratio_over_time.value(1) == 0.25
    assert c.loss_spec(1) == LossSpec(temperature=3.0, temperature_squared=False)
    assert c.loss_spec(9).temperature == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "jsd", "beta": 0.9},
        {"loss": "skew_forward_kl", "skew": 0.0},
        {"loss": "skew_reverse_kl", "skew": 0.99},
        {"loss": "reverse_kl", "z_loss": 1e-4},
        {"loss": "tvd", "temperature": 3.0, "temperature_squared": False},
    ],
)
def test_every_field_reaches_the_loss_spec(changes: dict) -> None:
    spec = config(**changes).loss_spec(5)
    named = {("divergence" if name == "loss" else name): value for name, value in changes.items()}
    assert spec == LossSpec(**named)


def test_z_loss_where_ce_counts_for_a_time() -> None:
    assert config(z_loss=1e-4, ratio=None, ratio_schedule="linear:0:1:9").loss_spec(0).z_loss == 1e-4


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"ratio": 0.0}, True),
        ({"ratio": 0.1}, False),
        ({"ratio": None, "ratio_schedule": "linear:0:0:5"}, True),
        ({"ratio": None, "ratio_schedule": "linear:0:1:5"}, False),
        ({"ratio": None, "ratio_schedule": "linear:1:0:5"}, False),
    ],
)
def test_plain_pretraining(changes: dict, expected: bool) -> None:
    assert config(**changes).is_plain_pretraining is expected


def test_loss_spec() -> None:
    assert LossSpec(temperature=3.0).temperature_factor == 9.0
    assert LossSpec(temperature=3.0, temperature_squared=False).temperature_factor == 1.0
    for temperature in (0.0, -2.0, math.nan, math.inf):
        with pytest.raises(MkdConfigError, match="--kd-temperature"):
            LossSpec(temperature=temperature)
    with pytest.raises(MkdConfigError, match=r"--kd-loss is 'reverse'.*did you mean 'reverse_kl'"):
        LossSpec(divergence="reverse")
    with pytest.raises(MkdConfigError, match="--kd-beta"):
        LossSpec(divergence="jsd", beta=1.0)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().ratio = 0.7


def test_pairs_of_layers() -> None:
    assert config().layer_pairs == ()
    pairs = config(hidden_loss="4:8, 2:8,2:1", ratio=None, ratio_schedule="linear:0:1:9").layer_pairs
    assert pairs == (LayerPair(4, 8), LayerPair(2, 8), LayerPair(2, 1))
    assert str(pairs[0]) == "4:8"
