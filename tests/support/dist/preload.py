"""Modules that forked processes need, imported once in the fork server: CPU redirect first, then megatron."""

import functools
import gc
import importlib
import os
import pkgutil

os.environ.pop("LD_PRELOAD", None)  # of `fork_server`: programs that forks start do without it

import torch

import mkd
import mkd.cpu

gc.disable()  # until all is imported
torch.set_num_threads(1)  # before any parallel region: OpenMP's threads would not survive the fork
if mkd.cpu.wanted():
    mkd.cpu.activate()

import megatron.core  # noqa: E402
import megatron.core.datasets.gpt_dataset  # noqa: E402
import megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader  # noqa: E402
import megatron.core.models.mimo  # noqa: E402
import megatron.core.tokenizers.text.models  # noqa: E402
import megatron.training  # noqa: E402, F401
import pytest  # noqa: E402, F401
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher  # noqa: E402, F401

# Importing these names imports what they need, such as accelerate for a config: 0.3 s of CPU.
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402, F401

from mkd.config.flags import flag_parser  # noqa: E402
from tests.support.quick_megatron import make_quick  # noqa: E402

make_quick()
for found in pkgutil.walk_packages(mkd.__path__, "mkd."):  # 0.4 s of CPU in each fork
    importlib.import_module(found.name)
flag_parser()  # forks find it made, and the texts of Megatron's flags read
MEGATRON_CACHES = [
    found
    for found in gc.get_objects()
    if type(found) is functools._lru_cache_wrapper and found.__module__.startswith("megatron.")
]
"""Megatron's functools.lru_cache wrappers, listed before gc.freeze() hides them."""
gc.freeze()  # a collection after each case would look through all that was imported: 0.2 s
gc.enable()
