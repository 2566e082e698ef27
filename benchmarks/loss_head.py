"""Measures the loss head alone on the CPU, Megatron's beside the fused one: time of forward and backward, peak memory.

python benchmarks/loss_head.py             # gpt2_124m, 8 x 512 tokens: benchmarks/results/cpu/loss_head.jsonl
python benchmarks/loss_head.py --log-prob --softcap 30 --entropy     # log-probabilities and entropies of the labels
python benchmarks/loss_head.py --peaks     # what it makes on a GPU, at sizes that need one: loss_head_peaks.jsonl

Stock is ColumnParallelLinear and vocab_parallel_cross_entropy; the fused head runs in both of its forms. With
--log-prob, linear_log_prob runs beside the full computation, log_softmax of all logits in float32. All of them
alternate in one process; the results are ratios of medians. Peak memory is the most that tensors made inside hold at
once, gradients included, in a separate run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurements import DTYPES, RESULTS, add_model_arguments, append_records, describe_cpu_run, record_measurement
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from tqdm import tqdm

from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.simulated.device import on_device
from tempo_megatron.memory.tape.follower import Follower
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file


class Heads:
    """All heads on one problem: `hidden` [s, b, h], `weight` [v, h], `labels` [b, s] and a loss mask of ones.

    The others are compared with the first of `forms`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        shape = make_shape(**read_shape_file(args.model))
        self.dtype = DTYPES[args.dtype]
        config = build_transformer_config(shape, dtype=self.dtype, perform_initialization=False)
        self.layer = ColumnParallelLinear(
            config.hidden_size, args.vocab_size, config=config, init_method=config.init_method, bias=False
        )
        torch.manual_seed(1234)
        s, b, h = args.seq_length, args.micro_batch_size, config.hidden_size
        with torch.no_grad():
            self.weight = self.layer.weight.normal_(std=0.02)
        self.hidden = torch.randn(s, b, h).to(self.dtype).requires_grad_()
        self.labels = torch.randint(args.vocab_size, (b, s))
        self.mask = torch.ones(b, s)
        self.chunk_tokens = args.chunk_tokens
        self.scaling = args.temperature, args.softcap, args.entropy
        self.forms: dict[str, Callable[[], Tensor]] = {
            "stock": self.stock, "recomputed": self.recomputed, "in_forward": self.in_forward
        }  # fmt: skip
        if args.log_prob:
            self.forms = {"full": self.full_log_prob, "recomputed": self.recomputed_log_prob}

    def stock(self) -> Tensor:
        logits, _ = self.layer(self.hidden)
        losses = vocab_parallel_cross_entropy(logits, self.labels.transpose(0, 1).contiguous())
        return (losses.transpose(0, 1).contiguous() * self.mask).sum() / self.mask.sum()

    def recomputed(self) -> Tensor:
        losses = linear_cross_entropy(self.hidden, self.weight, self.labels, chunk_tokens=self.chunk_tokens)
        return (losses * self.mask).sum() / self.mask.sum()

    def in_forward(self) -> Tensor:
        total, _ = linear_cross_entropy(
            self.hidden, self.weight, self.labels, chunk_tokens=self.chunk_tokens, token_weights=self.mask
        )
        return total / self.mask.sum()

    def full_log_prob(self) -> Tensor:
        temperature, softcap, has_entropy = self.scaling
        logits = F.linear(self.hidden, self.weight).float()
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        log_probs = F.log_softmax(logits / temperature, -1)
        log_prob = log_probs.gather(-1, self.labels.t().unsqueeze(-1)).squeeze(-1).t()
        entropy = -(log_probs.exp() * log_probs).sum(-1).t() if has_entropy else None
        return self.policy_loss(log_prob, entropy)

    def recomputed_log_prob(self) -> Tensor:
        found = linear_log_prob(self.hidden, self.weight, self.labels, *self.scaling, chunk_tokens=self.chunk_tokens)
        return self.policy_loss(*(found if self.scaling[2] else (found, None)))

    def policy_loss(self, log_prob: Tensor, entropy: Tensor | None) -> Tensor:
        """Computes a policy-gradient loss with a bonus for entropy."""
        losses = -log_prob if entropy is None else -log_prob - 0.01 * entropy
        return (losses * self.mask).sum() / self.mask.sum()

    def step(self, form: str) -> tuple[float, float, float]:
        """Returns the seconds of forward and backward, the processors' seconds of this process, and the loss."""
        self.hidden.grad = self.weight.grad = None
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = self.forms[form]()
        loss.backward()
        return time.perf_counter() - start, time.process_time() - cpu_start, loss.item()

    def peak_bytes(self, form: str) -> int:
        self.hidden.grad = self.weight.grad = None
        with Follower(self.hidden, self.weight, self.labels, self.mask) as seen:
            self.forms[form]().backward()
        return seen.peak


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns medians of alternating steps; the runs that measure memory come first and warm up."""
    cpu.use_cpu()
    with simulate_layout(1):
        heads = Heads(args)
        peaks = {form: heads.peak_bytes(form) for form in heads.forms}
        seconds: dict[str, list[float]] = {form: [] for form in heads.forms}
        cpu_seconds: dict[str, list[float]] = {form: [] for form in heads.forms}
        losses = {}
        for _ in tqdm(range(args.rounds), unit="round", disable=None):
            for form in heads.forms:
                took, cpu_took, losses[form] = heads.step(form)
                seconds[form].append(took)
                cpu_seconds[form].append(cpu_took)
    medians, cpu_medians = ({f: statistics.median(t) for f, t in s.items()} for s in (seconds, cpu_seconds))
    first = next(iter(heads.forms))
    gradient_bytes = (heads.weight.numel() + heads.hidden.numel()) * heads.dtype.itemsize
    return {
        "model": Path(args.model).stem,
        "shape": {"s": args.seq_length, "b": args.micro_batch_size, "h": heads.hidden.size(2), "v": args.vocab_size},
        "dtype": args.dtype,
        "chunk_tokens": args.chunk_tokens,
        **(
            {"log_prob": {"temperature": args.temperature, "softcap": args.softcap, "entropy": args.entropy}}
            if args.log_prob
            else {}
        ),
        "ms": {form: round(1e3 * median, 1) for form, median in medians.items()},
        "ms_of_rounds": {form: [round(1e3 * s, 1) for s in took] for form, took in seconds.items()},
        f"over_{first}": {form: round(median / medians[first], 3) for form, median in medians.items()},
        f"cpu_over_{first}": {form: round(median / cpu_medians[first], 3) for form, median in cpu_medians.items()},
        "peak_bytes": peaks,
        f"{first}_over_peak": {form: round(peaks[first] / peak, 2) for form, peak in peaks.items()},
        "gradient_bytes": gradient_bytes,
        "loss": losses,
        "rounds": args.rounds,
        "note": "machine shared with other work" if args.shared else "",
        **describe_cpu_run(),
    }


def find_peak(tokens: int, rows: int, hidden_size: int = 2048) -> dict[str, int]:
    """What the head makes at most on a GPU in forward and backward of `rows` of a bfloat16 weight, followed on tensors
    without memory; and its inputs, which are there anyway."""
    with FakeTensorMode(), on_device("te"):
        hidden = torch.empty(tokens, 1, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(rows, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(1, tokens, dtype=torch.int64)
        inputs = hidden, weight, labels
        with Follower(*inputs) as seen:
            linear_cross_entropy(*inputs).sum().backward()
    return {"tokens": tokens, "rows": rows, "made_bytes": seen.peak, "input_bytes": sum(t.nbytes for t in inputs)}


def record_peaks(path: Path = RESULTS / "cpu" / "loss_head_peaks.jsonl") -> None:
    """SkyRL's shapes: a quarter of Qwen3.6's vocabulary, and all of it; and 2**18 rows."""
    path.unlink(missing_ok=True)
    append_records(path, [find_peak(t, v) for v in (62080, 248320, 262144) for t in (8192, 32768, 262144)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_arguments(parser, micro_batch_size=8)
    parser.add_argument("--chunk-tokens", type=int, help="default the operation's own")
    parser.add_argument("--log-prob", action="store_true", help="measure linear_log_prob, not the losses")
    parser.add_argument("--temperature", type=float, default=0.7, help="of --log-prob; default %(default)s")
    parser.add_argument("--softcap", type=float, help="of --log-prob; default none")
    parser.add_argument("--entropy", action="store_true", help="of --log-prob: the entropies too")
    parser.add_argument("--shared", action="store_true", help="note that other work ran on the machine")
    parser.add_argument("--peaks", action="store_true", help="only follow what the head makes on a GPU")
    if parser.parse_known_args()[0].peaks:
        record_peaks()
        return
    record_measurement(parser, measure, RESULTS / "cpu" / "loss_head.jsonl", rounds=3)


if __name__ == "__main__":
    main()
