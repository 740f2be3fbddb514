"""The loss from hidden states in other packages and in plain PyTorch.

Each docstring describes what is computed and what is left out. All implementations return the mean over tokens, so that
gradients can be compared. Only megatron-core and Model-Optimizer can shard the vocabulary over ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_heads import CE_ONLY, Contender, Gradients, Inputs, Objective, Run, differentiate, kd_only, with_ce
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor


def eager(inputs: Inputs, objective: Objective) -> Run:
    """The usual training script: all logits at once in the input dtype, softmaxes in fp32, gradients by autograd."""
    _require_one_rank(inputs)

    def run() -> Gradients:
        z = inputs.hidden @ inputs.weight.t()
        u = inputs.teacher_hidden @ inputs.teacher_weight.t()
        return differentiate(eager_objective(z, u, inputs.labels, objective) / len(z), inputs)

    return run


def eager_objective(z: Tensor, u: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Sum over tokens in fp32, for logits [tokens, V] of any float dtype; divergences: forward_kl and jsd."""
    terms = []
    if objective.ce:
        terms.append(objective.ce * F.cross_entropy(z.float(), labels, reduction="sum"))
    log_q, log_p = z.float().log_softmax(dim=-1), u.float().log_softmax(dim=-1)
    if objective.spec.divergence == "forward_kl":
        divergence = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    elif objective.spec.divergence == "jsd":
        shares = torch.tensor([1 - objective.spec.beta, objective.spec.beta], device=z.device).log()[:, None, None]
        log_m = torch.logsumexp(torch.stack([log_q, log_p]) + shares, dim=0)
        teacher_kl, student_kl = (F.kl_div(log_m, x, reduction="sum", log_target=True) for x in (log_p, log_q))
        divergence = objective.spec.beta * teacher_kl + (1 - objective.spec.beta) * student_kl
    else:
        raise NotImplementedError(f"eager {objective.spec.divergence}")
    terms.append(objective.kd * divergence)
    return torch.stack(terms).sum()


def compiled_chunks(inputs: Inputs, objective: Objective, chunk_rows: int) -> Run:
    """The fastest plain PyTorch: chunks of tokens, loss and logit gradient in one torch.compile'd function, cuBLAS
    matrix products around it, gradients computed in the forward pass, and the LM head's accumulated in its own dtype.

    A backward pass would also multiply both gradients by a scalar; this is left out.
    """
    _require_one_rank(inputs)
    count = inputs.hidden.shape[0]

    def chunk_loss(z: Tensor, u: Tensor, labels: Tensor) -> Tensor:
        return eager_objective(z, u, labels, objective) / count

    gradient_and_value = torch.compile(torch.func.grad_and_value(chunk_loss), dynamic=False)
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()

    def run() -> Gradients:
        total = torch.zeros((), device=hidden.device)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, count, chunk_rows):
            rows = slice(start, start + chunk_rows)
            z, u = hidden[rows] @ weight.t(), inputs.teacher_hidden[rows] @ inputs.teacher_weight.t()
            d_logits, value = gradient_and_value(z, u, inputs.labels[rows])
            total += value
            torch.mm(d_logits, weight, out=d_hidden[rows])
            d_weight.addmm_(d_logits.t(), hidden[rows])
        return Gradients(total, d_hidden, d_weight)

    return run


def liger_fused_jsd(inputs: Inputs, objective: Objective) -> Run:
    """`LigerFusedLinearJSD`: JSD alone, no CE. For an upstream gradient of 1, as here, backward returns the gradients
    without scaling them."""
    _require_one_rank(inputs)
    from liger_kernel.transformers import LigerFusedLinearJSD

    module = LigerFusedLinearJSD(jsd_beta=objective.spec.beta)

    def run() -> Gradients:
        loss = module(inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight, inputs.labels)
        return differentiate(loss, inputs)

    return run


def liger_chunked_jsd(inputs: Inputs, objective: Objective) -> Run:
    """`LigerFusedLinearJSDLoss`, compiled, with its default of 1024 tokens per chunk: JSD with log-softmax in the dtype
    of the logits unless the compiler keeps fp32, CE in fp32."""
    _require_one_rank(inputs)
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(
        weight_hard_loss=objective.ce, weight_soft_loss=objective.kd, beta=objective.spec.beta, compiled=True
    )

    def run() -> Gradients:
        loss = module(inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight, inputs.labels)
        return differentiate(loss, inputs)

    return run


def model_optimizer_kl(inputs: Inputs, objective: Objective) -> Run:
    """`LogitsKLLoss` of Model-Optimizer's Megatron plugin: forward KL of all logits at once, fp32 softmaxes, gradients
    by autograd, and no CE by default. Vocabulary-parallel: the term of each rank is a part of the sum.
    """
    from modelopt.torch.distill.plugins.megatron import LogitsKLLoss

    module = model_optimizer_module(LogitsKLLoss, inputs.group.size())

    def run() -> Gradients:
        z, u = _parallel_logits(inputs), inputs.teacher_hidden[:, None] @ inputs.teacher_weight.t()
        per_token, is_partial, _ = module(z, u)
        gradients = differentiate(per_token.mean(), inputs)
        if is_partial and inputs.group.size() > 1:
            dist.all_reduce(gradients.loss, group=inputs.group)
        return gradients

    return run


def model_optimizer_module(loss_class: type, ranks: int) -> torch.nn.Module:
    """A Model-Optimizer loss; of the student's config it reads only the tensor-parallel size."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=64 * ranks, num_attention_heads=ranks, tensor_model_parallel_size=ranks
    )
    return loss_class(config)


def megatron_ce(inputs: Inputs, objective: Objective, kind: str) -> Run:
    """megatron-core's CE of all logits at once, without a teacher. `kind`: unfused, native (compiled pieces) or te
    (Transformer Engine's kernel)."""
    if kind == "unfused":
        cross_entropy = vocab_parallel_cross_entropy
    elif kind == "native":
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as cross_entropy
    else:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy as cross_entropy
    options = {"dist_process_group" if kind == "te" else "tp_group": inputs.group}

    def run() -> Gradients:
        z = _parallel_logits(inputs)
        return differentiate(cross_entropy(z, inputs.labels[:, None], **options).mean(), inputs)

    return run


def _parallel_logits(inputs: Inputs) -> Tensor:
    """[N, 1, V/tp]; the gradient of the hidden states is summed over ranks."""
    hidden = copy_to_tensor_model_parallel_region(inputs.hidden, group=inputs.group)
    return hidden[:, None] @ inputs.weight.t()


def _require_one_rank(inputs: Inputs) -> None:
    if inputs.group.size() > 1:
        raise NotImplementedError("the vocabulary cannot be sharded over ranks")


def peers(wanted: list[str]) -> list[Contender]:
    """Contenders of other packages; `wanted`: eager, compile, liger, modelopt, mcore."""
    forward_kl, ce_and_kl, ce_and_jsd = kd_only("forward_kl"), with_ce("forward_kl"), with_ce("jsd")
    table = {
        "eager": [Contender("eager torch", o, lambda i, o=o: eager(i, o)) for o in (forward_kl, ce_and_kl, ce_and_jsd)],
        "compile": [
            Contender(f"torch.compile, {rows} rows", o, lambda i, o=o, rows=rows: compiled_chunks(i, o, rows))
            for o, rows in ((forward_kl, 1024), (forward_kl, 4096), (ce_and_kl, 4096), (ce_and_jsd, 4096))
        ],
        "liger": [
            Contender("Liger fused-linear JSD", kd_only("jsd"), lambda i: liger_fused_jsd(i, kd_only("jsd"))),
            Contender("Liger chunked JSD + CE, compiled", ce_and_jsd, lambda i: liger_chunked_jsd(i, ce_and_jsd)),
        ],
        "modelopt": [
            Contender("Model-Optimizer LogitsKLLoss", forward_kl, lambda i: model_optimizer_kl(i, forward_kl))
        ],
        "mcore": [
            Contender(f"megatron-core CE, {kind}", CE_ONLY, lambda i, kind=kind: megatron_ce(i, CE_ONLY, kind))
            for kind in ("unfused", "native", "te")
        ],
    }
    return [contender for name in wanted if name in table for contender in table[name]]
