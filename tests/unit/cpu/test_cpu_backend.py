"""mkd/cpu: the CPU behaves like one CUDA device. Backends of process groups: tests/dist."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

import mkd.cpu
from mkd.config.flags import default_arguments
from mkd.cpu import gloo
from mkd.cpu.flags import VALUES, set_cpu_values
from mkd.errors import MkdConfigError

pytestmark = pytest.mark.skipif(not mkd.cpu.is_active(), reason="this process computes on a GPU")

CPU = torch.device("cpu")


def test_wanted(monkeypatch):
    """`is_available` is a stub already, so the test replaces it for both kinds of machine."""
    for has_gpu, choice, expected in [
        (False, None, True),
        (True, None, False),
        (False, "cpu", True),
        (True, "CPU", True),
        (True, "cuda", False),
        (True, "", False),
    ]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.delenv("MKD_DEVICE", raising=False)
        if choice is not None:
            monkeypatch.setenv("MKD_DEVICE", choice)
        assert mkd.cpu.wanted() is expected


def test_invalid_device_variable(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for choice, words in [("gpu", "MKD_DEVICE is 'gpu'; legal values are cpu and cuda"), ("cuda", "no CUDA device")]:
        monkeypatch.setenv("MKD_DEVICE", choice)
        with pytest.raises(MkdConfigError, match=words):
            mkd.cpu.wanted()


def test_importing_has_no_effect_and_activating_is_idempotent(tmp_path):
    code = """
import importlib.util
import torch
real = torch.cuda.is_available
import mkd.cpu
assert not mkd.cpu.is_active() and torch.cuda.is_available is real
mkd.cpu.activate()
stub, group = torch.cuda.is_available, torch.distributed.new_group
assert mkd.cpu.is_active() and stub is not real
mkd.cpu.activate()
assert torch.cuda.is_available is stub and torch.distributed.new_group is group
assert importlib.util.find_spec("transformer_engine") is None  # installed, but it needs CUDA
"""
    (tmp_path / "transformer_engine.py").write_text("raise AssertionError('imported on CPU')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "MKD_DEVICE": "cpu", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""


@pytest.mark.parametrize("stands_in", [True, False])
def test_a_stand_in_leaves_the_environment_of_jobs_for_gpus_alone(monkeypatch, stands_in):
    """They inherit it: without torch.compile, Megatron's fused functions would not be fused in them."""
    from mkd.cpu import attention, biased_experts, cuda_stubs, device_mode, gloo, latent_attention, norms

    for module in (attention, biased_experts, cuda_stubs, gloo, latent_attention, norms):
        monkeypatch.setattr(module, "install", lambda *args: None)
    monkeypatch.setattr(device_mode, "enter", lambda: None)
    monkeypatch.setattr(mkd.cpu, "is_active", lambda: False)
    for name in ("_stands_in", "_capability"):
        monkeypatch.setattr(mkd.cpu, name, None)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch, "compile", torch.compile)  # restored
    mkd.cpu.activate(stands_in, (9, 0))
    assert os.environ.get("TORCHDYNAMO_DISABLE") == (None if stands_in else "1")
    assert bool(os.environ) != stands_in
    if stands_in:
        assert torch.compile(len) is len and torch.compile(mode="default")(len) is len


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3", 0, 2])
def test_all_names_of_the_device(device):
    plain = torch.arange(3.0)
    made = [
        torch.zeros(2, device=device),
        torch.tensor([1], device=device),
        torch.empty_like(plain, device=device),
        torch.randn(2, device=device, generator=torch.Generator().manual_seed(1)),
        plain.to(device),
        plain.to(device, torch.float64),
        plain.to(device=device, dtype=torch.float64),
        plain.new_zeros(2, device=device),
    ]
    assert all(tensor.device == CPU for tensor in made)
    assert plain.to(device, torch.float64).dtype == torch.float64
    assert torch.nn.Linear(2, 2, device=device).weight.device == CPU


def test_device_objects():
    for device in (torch.device("cuda"), torch.device("cuda:1"), torch.device("cuda", 1), torch.device(type="cuda")):
        assert device == CPU
    assert torch.device("meta").type == "meta"


def test_moves_to_the_device():
    plain = torch.arange(3.0)
    assert plain.cuda() is plain
    assert plain.cuda(0, non_blocking=True) is plain
    assert plain.pin_memory() is plain
    assert torch.zeros(2, pin_memory=True).device == CPU
    assert torch.nn.Linear(2, 2).cuda().weight.device == CPU
    assert plain.to("cpu").device == CPU and plain.to(torch.float64).dtype == torch.float64
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_devices_inside_a_backward_pass():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 * ctx.saved_tensors[0] * torch.ones((), device="cuda")

    x = torch.tensor(3.0, requires_grad=True)
    Square.apply(x).backward()
    assert x.grad == 6.0
    (grad,) = torch.autograd.grad(Square.apply(x), x)
    assert grad == 6.0


def test_type_is_that_of_a_cuda_tensor():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_one_device():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_properties(0).major == 8
    torch.cuda.set_device(5)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.memory_stats()["anything"] == 0
    assert torch.cuda.mem_get_info() == (0, 0)
    assert torch.cuda.max_memory_allocated() > 2**25  # the process has imported torch


def test_streams_and_events_complete_at_once():
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream), torch.cuda.device(0), stream:
        stream.wait_stream(torch.cuda.current_stream())
        event.record(stream)
        stream.wait_event(event)
        assert stream.record_event(event) is event
        assert stream.record_event().query()
    event.wait()
    event.synchronize()
    stream.synchronize()
    torch.cuda.synchronize()
    assert event.query() and stream.query() and event.elapsed_time(event) == 0.0
    time.sleep(0.01)
    later = stream.record_event()
    assert 10.0 <= event.elapsed_time(later) < 1000.0  # ms
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()


def test_device_generator_is_the_cpu_generator():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)
    assert torch.cuda.default_generators[0] is torch.default_generator


def test_groups_use_gloo(monkeypatch):
    """For any backend, device or options that a caller passes to torch.distributed."""
    seen = []

    def create(*args, **kwargs):
        seen.append((args, kwargs))

    first = gloo._force_backend(create)
    first("nccl", world_size=2)
    first(backend="nccl", device_id=torch.device("cuda"), pg_options=object(), rank=1)
    gloo._force_new_group(create)([0, 1], 5, "nccl", object(), group_desc="tp")
    gloo._force_new_group(create)(ranks=[0], backend="nccl", pg_options=object())
    assert seen == [
        (("gloo",), {"world_size": 2}),
        ((), {"backend": "gloo", "rank": 1}),
        (([0, 1], 5), {"backend": "gloo", "group_desc": "tp"}),
        ((), {"ranks": [0], "backend": "gloo"}),
    ]


def test_split_sizes_are_lists_for_gloo():
    seen = []
    exchange = gloo._sizes_as_lists(lambda *args, **kwargs: seen.append((args[2:], kwargs)))
    exchange(torch.zeros(3), torch.zeros(3), torch.tensor([1, 2]), torch.tensor([2, 1]), group="ep", async_op=True)
    exchange(torch.zeros(3), torch.zeros(3), [1, 2])
    options = {"group": "ep", "async_op": True}
    assert seen == [(([1, 2], [2, 1]), options), (([1, 2], None), {"group": None, "async_op": False})]
    assert type(seen[0][0][0][0]) is int


def test_barriers_have_no_device():
    seen = []
    gloo._barrier_without_devices(lambda **kwargs: seen.append(kwargs))(group="g", device_ids=[0])
    assert seen == [{"group": "g", "async_op": False}]
    assert dist.barrier.__wrapped__ is not None


def test_flags_of_a_gpu_job_on_cpu():
    args = default_arguments()
    assert args.transformer_impl == "transformer_engine"
    changed = set_cpu_values(args)
    assert {name: getattr(args, name) for name in VALUES} == VALUES
    assert "transformer_impl" in changed and "distributed_backend" in changed
    assert set_cpu_values(args) == []


def test_older_flag_of_graphs_on_cpu():
    args = default_arguments()
    args.external_cuda_graph = True  # Megatron turns it into --cuda-graph-impl later
    assert "external_cuda_graph" in set_cpu_values(args) and not args.external_cuda_graph


@pytest.mark.parametrize("name, value", [("fp8", "hybrid"), ("fp8", "e4m3"), ("fp4", "e2m1")])
def test_unsupported_arithmetic_on_cpu(name, value):
    args = default_arguments()
    setattr(args, name, value)
    with pytest.raises(MkdConfigError, match=f"--{name}-format is {value}"):
        set_cpu_values(args)
    assert args.transformer_impl == "transformer_engine"


@pytest.mark.parametrize("kind, cls", [("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms(kind, cls, sequence_parallel):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=6,
        num_attention_heads=2,
        normalization=kind,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2,
    )
    norm = WrappedTorchNorm(config, 6, eps=1e-3)
    assert type(norm) is cls and norm.eps == 1e-3
    assert all(parameter.sequence_parallel is sequence_parallel for parameter in norm.parameters())
