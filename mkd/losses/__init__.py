"""Knowledge distillation losses over a vocabulary that is split over tensor-parallel ranks."""

from mkd.config.loss_spec import LossSpec
from mkd.losses.from_logits import loss_from_logits
from mkd.losses.fused_linear import loss_from_hidden
from mkd.losses.inputs import LinearLogits, LogitMap, LogitMaps, TokenWeights
from mkd.losses.measure.comparison import Comparison, compare_models
from mkd.losses.measure.topk import teacher_top_k
from mkd.losses.options import LossOptions
from mkd.losses.output import LossOutput
from mkd.losses.sparse.teacher import SparseTeacher, Tail
from mkd.losses.tensor_api import fused_linear_loss, fused_linear_topk_loss, topk_loss, vocab_parallel_loss
from mkd.losses.vocab_shard import VocabLayout

__all__ = [
    "Comparison",
    "LinearLogits",
    "LogitMap",
    "LogitMaps",
    "LossOptions",
    "LossOutput",
    "LossSpec",
    "SparseTeacher",
    "Tail",
    "TokenWeights",
    "VocabLayout",
    "compare_models",
    "fused_linear_loss",
    "fused_linear_topk_loss",
    "loss_from_hidden",
    "loss_from_logits",
    "teacher_top_k",
    "topk_loss",
    "vocab_parallel_loss",
]
