"""A small GPT, BERT and T5 for tests, in whatever layout the process is in, and what gradients are held against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from sequence_parts import take_part

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize, tempoize_embedding, tempoize_loss, use_cpu
from tempo_megatron.slots import dropout_rng

VOCAB_SIZE = 64
SEQ_LENGTH = 16
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
RECOMPUTE = TempoConfig(activation="recompute", norm="recompute")
# What "auto" takes where nothing refuses it, but written.
WRITTEN = TempoConfig(activation="inplace", norm="inplace", dropout="recompute", attention="flash", loss="fused")


def gpt_config(
    cls: Any = TransformerConfig, *, sequence_parallel: bool = False, dropout: float = 0.0, **overrides: Any
) -> Any:
    """Two layers, h 32, 4 heads."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "sequence_parallel": sequence_parallel,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        **overrides,
    }
    return cls(**settings)


def build_gpt(
    config: TransformerConfig,
    tempo_config: TempoConfig,
    seed: int = 7,
    *,
    spec: Any = None,
    cls: Any = GPTModel,
    **settings: Any,
) -> Any:
    """The model with weights that depend on the seed only, in training mode; of tempo_block_spec's spec by default."""
    torch.manual_seed(seed)
    spec = spec or tempo_block_spec(config, tempo_config)
    model = cls(config, spec, vocab_size=VOCAB_SIZE, max_sequence_length=SEQ_LENGTH, **settings)
    tempoize_embedding(model, tempo_config)
    tempoize_loss(model, tempo_config)
    return model.to(config.params_dtype).train()


def tokens_of(first_sample: int, batch: int) -> torch.Tensor:
    """[b, s] tokens of consecutive samples, each a function of its index."""
    generators = (torch.Generator().manual_seed(1000 + first_sample + i) for i in range(batch))
    return torch.stack([torch.randint(VOCAB_SIZE, (SEQ_LENGTH + 1,), generator=g) for g in generators])


def losses(model: GPTModel, first_sample: int, batch: int, *, gives_mask: bool, seed: int = 5) -> torch.Tensor:
    """Per-token losses of a training forward, [b, s], or of this context-parallel rank's rows."""
    dropout_rng.set_micro_batch(seed, first_sample)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1) if gives_mask else None
    return run_tokens(model, tokens_of(first_sample, batch), mask)


def run_schedule(
    model: Any, forward: Callable[[int], torch.Tensor], first_samples: Sequence[int]
) -> list[torch.Tensor]:
    """The losses of micro batches of two samples, whose mean's gradients Megatron's schedule adds up; none but on a
    pipeline's last stage. `forward` is given a micro batch's first sample."""

    def run_one(samples: Iterator[int], _: Any) -> Any:
        return forward(next(samples)), lambda out: (out.mean(), {"loss": out.detach()})

    found = get_forward_backward_func()(
        forward_step_func=run_one,
        data_iterator=iter(first_samples),
        model=model,
        num_microbatches=len(first_samples),
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return [each["loss"] for each in found]


def run_tokens(model: GPTModel, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The losses of a forward of tokens [b, s + 1] whose micro batch was announced, as of `losses`."""
    positions = torch.arange(SEQ_LENGTH).expand(len(tokens), -1)
    inputs, positions, labels = take_part(tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous())
    found: torch.Tensor = model(inputs, positions, mask, labels=labels)
    return found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by parameter name, summed over the context-parallel group, and those of sequence-parallel parameters
    over the tensor-parallel group. What the loss does not depend on, as BERT's pooler, has none."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        if parallel_state.get_context_parallel_world_size() > 1:
            torch.distributed.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        found[name] = grad
    return found


def differentiate(model: Any, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, added up over the context-parallel group, and gradients by parameter name, after its backward."""
    loss.backward()
    loss = loss.detach()
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    return loss.item(), gradients(model)


def gradient_errors_eps(found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> dict[str, float]:
    """By name, the largest difference in units of float32's round-off of the gradient's largest element.

    Some, as that of a key's bias, are nothing but round-off: there a thousandth of the largest of all counts instead.
    """
    least = 1e-3 * max(grad.abs().max().item() for grad in stock.values())
    eps = torch.finfo(torch.float32).eps
    return {
        name: (found[name] - grad).abs().max().item() / max(grad.abs().max().item(), least) / eps
        for name, grad in stock.items()
    }


def largest_gradient_error_eps(found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> float:
    """NaN where one is."""
    return torch.tensor([*gradient_errors_eps(found, stock).values()]).max().item()


def assert_equal_to_stock(
    found: tuple[float, dict[str, torch.Tensor]], stock: tuple[float, dict[str, torch.Tensor]], name: str = ""
) -> None:
    """Each a loss, and gradients by name."""
    assert found[0] == pytest.approx(stock[0], rel=1e-6), name
    assert found[1].keys() == stock[1].keys(), name
    # The round-off of a few hundred additions, whose order is the processor's: up to 147 were seen.
    errors = gradient_errors_eps(found[1], stock[1])
    assert not {key: error for key, error in errors.items() if not error <= 200}, name


def build_bert(
    config: TransformerConfig, tempo_config: TempoConfig, *, spec: Any = bert_layer_local_spec, **settings: Any
) -> BertModel:
    """As build_gpt, of the layer spec with Tempo, and with the stock loss head."""
    spec = spec if tempo_config.is_off else tempoize(spec, config, tempo_config)
    return _finish(functools.partial(BertModel, config, 0, spec), tempo_config, settings)


def build_t5(config: TransformerConfig, tempo_config: TempoConfig, **settings: Any) -> T5Model:
    """As build_gpt, with the stock loss head."""
    specs = [encoder_model_with_local_spec(), decoder_model_with_local_spec()]
    if not tempo_config.is_off:
        specs = [tempoize(spec, config, tempo_config) for spec in specs]
    return _finish(functools.partial(T5Model, config, config, *specs), tempo_config, settings)


def _finish(build: Any, tempo_config: TempoConfig, settings: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = build(VOCAB_SIZE, SEQ_LENGTH, share_embeddings_and_output_weights=True, **settings)
    tempoize_embedding(model, tempo_config)
    return model.train()


def t5_losses(model: Any, **keywords: Any) -> torch.Tensor:
    """The losses of a T5Model on two samples, whose encoder has padding."""
    dropout_rng.set_micro_batch(5, 0)
    tokens = tokens_of(0, 2)[:, :-1].contiguous()
    everything = torch.zeros(2, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool)
    seen = [everything.clone() for _ in range(3)]
    seen[0][..., 12:] = seen[2][..., 12:] = True
    seen[1] = torch.ones_like(everything).triu(1)
    found: torch.Tensor = model(tokens, tokens.flip(1), *seen, lm_labels=tokens, **keywords)
    return found


def bert_losses(model: Any, first_sample: int = 0) -> torch.Tensor:
    """The losses of a BertModel on two samples, of which one has padding; of its first stage the hidden states."""
    dropout_rng.set_micro_batch(5, first_sample)
    tokens = tokens_of(first_sample, 2)
    padding = torch.ones(2, SEQ_LENGTH)
    padding[1, 10:] = 0
    found = model(tokens[:, :-1].contiguous(), padding, lm_labels=tokens[:, 1:].contiguous())
    return found[0] if isinstance(found, tuple) else found


def start_rank(store: str, rank: int, world_size: int) -> None:
    """Tensor parallelism over all ranks of a script's processes, on one core each."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    use_cpu()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model_parallel_cuda_manual_seed(1234)
