"""Knowledge distillation losses over a vocabulary that is split over tensor-parallel ranks."""

from mkd.config.kd_config import LossSpec
from mkd.losses.fused_linear import fused_linear_loss
from mkd.losses.logits import LogitMap, LogitMaps
from mkd.losses.measure.comparison import Comparison, LogitSource, compare_models
from mkd.losses.measure.topk import TopK, teacher_top_k
from mkd.losses.options import LossOptions
from mkd.losses.sparse.teacher import SparseTeacher
from mkd.losses.topk import fused_linear_topk_loss, topk_loss
from mkd.losses.vocab_parallel import LossOutput, vocab_parallel_loss
from mkd.losses.vocab_shard import VocabLayout

__all__ = [
    "Comparison",
    "LogitMap",
    "LogitMaps",
    "LogitSource",
    "LossOptions",
    "LossOutput",
    "LossSpec",
    "SparseTeacher",
    "TopK",
    "VocabLayout",
    "compare_models",
    "fused_linear_loss",
    "fused_linear_topk_loss",
    "teacher_top_k",
    "topk_loss",
    "vocab_parallel_loss",
]
