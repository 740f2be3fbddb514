"""What every worker needs, imported once in the fork server: CPU redirect first, then megatron."""

import torch

import mkd.cpu

torch.set_num_threads(1)  # before any parallel region: OpenMP's threads would not survive the fork
if mkd.cpu.wanted():
    mkd.cpu.activate()

import megatron.core  # noqa: E402
import megatron.training  # noqa: E402, F401
