"""Trains small models stock and with Tempo, for several seeds, and compares the losses on data they have not seen.

python benchmarks/training_proof.py        # what benchmarks/results/cpu/training_proof.jsonl does not have yet

- GPT, in Megatron's layers, on the sources of this machine's Python, without dropout in bf16 and in fp16 (float32
  master weights in AdamW, dynamic loss scaling), so that only arithmetic differs: every form has to end closer to
  stock, seed by seed, than stock's own seeds lie apart.
- GPT, BERT (masked tokens of the same text) and ViT (the digits of scikit-learn), of which the last two are those of
  transformers, with dropout 0.1, whose masks differ: of five seeds the 95 % confidence interval of the difference
  Tempo - stock (Student's, paired by seed) must not lie above 0.

Both sides of a seed begin with the same weights and see the same samples. A run that has ended is kept, and a case goes
on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measurements import RESULTS, ROOT, measure_missing
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from tqdm import tqdm

from tempo_megatron import TempoConfig, cpu, tempo_block_spec
from tempo_megatron.extras import check_installed
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import make_shape
from tempo_megatron.slots import dropout_rng

OUTPUT = RESULTS / "cpu" / "training_proof.jsonl"
NUM_LAYERS, HIDDEN, HEADS, LENGTH, VOCAB = 2, 64, 4, 64, 512
BATCH_SIZE, WARMUP_STEPS, HIGHEST_LR, WINDOW, HELD_OUT = 8, 50, 1e-3, 20, 64
FORMS = {
    "stock": TempoConfig.off(),
    "inplace": TempoConfig(),
    "recompute": TempoConfig(activation="recompute", norm="recompute"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTILES = {3: 4.303, 5: 2.776}
"""Seeds -> the 97.5 % quantile of Student's distribution with one degree of freedom fewer."""


class Case(NamedTuple):
    """What is trained, and which runs there are."""

    model: str
    dtype: str
    p: float
    forms: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int


CASES = {
    "GPT, bf16": Case("gpt", "bf16", 0.0, tuple(FORMS), (1, 2, 3), 300),
    "GPT, dropout": Case("gpt", "bf16", 0.1, ("stock", "inplace"), (1, 2, 3, 4, 5), 300),
    "BERT, dropout": Case("bert", "fp32", 0.1, ("stock", "inplace"), (1, 2, 3, 4, 5), 200),
    "ViT, dropout": Case("vit", "fp32", 0.1, ("stock", "inplace"), (1, 2, 3, 4, 5), 200),
    "GPT, fp16": Case("gpt", "fp16", 0.0, tuple(FORMS), (1, 2, 3), 100),
}
Batch = tuple[Tensor, ...]
Learner = tuple[torch.nn.Module, Callable[..., Tensor]]


class LossScale:
    """Dynamic loss scaling: halved where a gradient overflows, and that step is left out; doubled after 100 without."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_dynamic = dtype == torch.float16
        self.value, self.steps_since = 65536.0 if self.is_dynamic else 1.0, 0

    def update(self, is_finite: bool) -> None:
        self.steps_since = self.steps_since + 1 if is_finite else 0
        if self.is_dynamic:
            self.value *= 0.5 if not is_finite else 2.0 if self.steps_since % 100 == 0 else 1.0


def prepare_text(folder: Path) -> str:
    """The prefix of the data set; made where it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / "stdlib")
    words = ["--input-stdlib", "--max-bytes", "4M", "--vocab-size", str(VOCAB), "--output-prefix", prefix]
    subprocess.run([sys.executable, "launch/prepare_data.py", *words, "--skip-existing"], cwd=ROOT, check=True)
    return prefix


def draw_text(data: str, seed: int, number: int, *, is_held_out: bool) -> Iterable[Batch]:
    """Batches of tokens [b, s + 1] at random places; what is held out is the last tenth of the text."""
    dataset = IndexedDataset(data)
    tokens = torch.cat([torch.from_numpy(dataset[index].astype("int64")) for index in range(len(dataset))])
    border = tokens.numel() * 9 // 10
    tokens = tokens[border:] if is_held_out else tokens[:border]
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(tokens.numel() - LENGTH, (number, BATCH_SIZE, 1), generator=generator)
    return ((batch,) for batch in tokens[starts + torch.arange(LENGTH + 1)])


def draw_masked(data: str, seed: int, number: int, *, is_held_out: bool) -> Iterable[Batch]:
    """Tokens [b, s] of which a seventh is hidden (VOCAB), and labels, -100 where nothing is."""
    generator = torch.Generator().manual_seed(seed)
    for (tokens,) in draw_text(data, seed, number, is_held_out=is_held_out):
        is_hidden = torch.rand(BATCH_SIZE, LENGTH, generator=generator) < 1 / 7
        labels = tokens[:, :-1]
        yield labels.masked_fill(is_hidden, VOCAB), labels.masked_fill(~is_hidden, -100)


def draw_digits(data: str, seed: int, number: int, *, is_held_out: bool) -> Iterable[Batch]:
    """Images [32, 1, 8, 8] and digits [32]; every fifth image is held out."""
    check_installed("ViT on digits", "benchmarks", "sklearn")
    from sklearn.datasets import load_digits

    digits = load_digits()
    is_chosen = (torch.arange(len(digits.target)) % 5 == 0) == is_held_out
    images = torch.tensor(digits.images, dtype=torch.float32)[is_chosen, None] / 16
    labels = torch.tensor(digits.target)[is_chosen]
    generator = torch.Generator().manual_seed(seed)
    for chosen in torch.randint(len(labels), (number, 32), generator=generator):
        yield images[chosen], labels[chosen]


def build_gpt(case: Case, form: str, seed: int) -> Learner:
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "seq_length": LENGTH}
    shape = make_shape(**sizes, vocab_size=VOCAB, attention_dropout=case.p, hidden_dropout=case.p)
    config = build_transformer_config(shape, dtype=DTYPES[case.dtype])
    model_parallel_cuda_manual_seed(seed)
    spec = tempo_block_spec(config, FORMS[form])
    sizes = {"vocab_size": VOCAB, "max_sequence_length": LENGTH}
    model = GPTModel(config, spec, share_embeddings_and_output_weights=True, **sizes)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1) if form == "stock" else None

    def find_loss(tokens: Tensor) -> Tensor:
        positions = torch.arange(LENGTH).expand(BATCH_SIZE, -1)
        losses = model(tokens[:, :-1].contiguous(), positions, hidden, labels=tokens[:, 1:].contiguous())
        return losses.mean()

    return model, find_loss


def build_bert(case: Case, form: str, seed: int) -> Learner:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCAB + 1, "max_position_embeddings": LENGTH, **_list_sizes(case)}
    return _finish(BertForMaskedLM(BertConfig(**sizes)), form, seed)


def build_vit(case: Case, form: str, seed: int) -> Learner:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, **_list_sizes(case)}
    return _finish(ViTForImageClassification(ViTConfig(**sizes)), form, seed)


def _list_sizes(case: Case) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": 4 * HIDDEN, "hidden_dropout_prob": case.p, "attention_probs_dropout_prob": case.p,
    }  # fmt: skip


def _finish(model: Any, form: str, seed: int) -> Learner:
    from tempo_torch import tempoize

    if form != "stock":
        tempoize(model, seed=seed)
    return model, lambda given, labels: model(given, labels=labels).loss


MODELS: dict[str, tuple[Callable[[Case, str, int], Learner], Callable[..., Iterable[Batch]]]] = {
    "gpt": (build_gpt, draw_text),
    "bert": (build_bert, draw_masked),
    "vit": (build_vit, draw_digits),
}


def train(case: Case, form: str, seed: int, data: str, metrics: Path) -> None:
    """One run; writes its losses to `metrics` when it is done."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cpu.use_cpu()
    build, draw = MODELS[case.model]
    start = time.process_time()
    with simulate_layout(1):
        torch.manual_seed(seed)
        model, find_loss = build(case, form, seed)
        model.to(DTYPES[case.dtype]).train()
        parameters = list(model.parameters())
        masters = [p.detach().float().clone() for p in parameters]
        optimizer = torch.optim.AdamW(masters, lr=HIGHEST_LR, betas=(0.9, 0.95), weight_decay=0.1)
        scale, losses = LossScale(DTYPES[case.dtype]), []
        for step, batch in enumerate(draw(data, seed, case.steps, is_held_out=False)):
            progress = max(0.0, (step - WARMUP_STEPS) / max(1, case.steps - WARMUP_STEPS))
            shape = min(1.0, (step + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = HIGHEST_LR * shape
            dropout_rng.set_micro_batch(seed, step)
            loss = find_loss(*batch)
            (loss * scale.value).backward()
            for master, parameter in zip(masters, parameters, strict=True):
                grad, parameter.grad = parameter.grad, None
                master.grad = None if grad is None else grad.float() / scale.value
            norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
            if is_finite := bool(norm.isfinite()):
                optimizer.step()
                with torch.no_grad():
                    for master, parameter in zip(masters, parameters, strict=True):
                        parameter.copy_(master)
            losses.append(loss.item())
            scale.update(is_finite)
        model.eval()
        with torch.no_grad():
            held_out = [find_loss(*batch).item() for batch in draw(data, 0, HELD_OUT, is_held_out=True)]
    record = {"losses": losses, "held_out": statistics.fmean(held_out), "cpu_s": time.process_time() - start}
    unfinished = metrics.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record), encoding="utf-8")
    unfinished.replace(metrics)


def measure(name: str, folder: Path, jobs: int) -> dict[str, Any]:
    """All runs of a case, as far as they are not there yet, and what is to be said of them."""
    case = CASES[name]
    data = "" if case.model == "vit" else prepare_text(folder)
    stem = name.lower().replace(", ", "_")
    paths = {
        (form, seed): folder / f"{stem}-{form}-{seed}-{case.steps}.json" for form in case.forms for seed in case.seeds
    }
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        missing = [(run, path) for run, path in paths.items() if not path.exists()]
        futures = [pool.submit(train, case, *run, data, path) for run, path in missing]
        for future in tqdm(as_completed(futures), total=len(futures), unit="run", desc=name):
            future.result()
    runs = {run: json.loads(path.read_text(encoding="utf-8")) for run, path in paths.items()}
    return judge(case, runs)


def judge(case: Case, runs: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """The losses on held-out data, the spread of stock's seeds, and each form's differences from stock."""
    ends = {form: [runs[form, seed]["held_out"] for seed in case.seeds] for form in case.forms}
    spread = max(ends["stock"]) - min(ends["stock"])
    record: dict[str, Any] = {**case._asdict(), "stock_spread": round(spread, 5)}
    for form in case.forms:
        record[f"{form}_losses"] = [round(value, 5) for value in ends[form]]
        record[f"{form}_curves"] = [smooth(runs[form, seed]["losses"]) for seed in case.seeds]
        if form != "stock":
            differences = [ours - stock for ours, stock in zip(ends[form], ends["stock"], strict=True)]
            mean, half = find_interval(differences)
            farthest = max(map(abs, differences))
            record |= {
                f"{form}_farthest_from_stock": round(farthest, 5),
                f"{form}_difference": round(mean, 5),
                f"{form}_interval": [round(mean - half, 5), round(mean + half, 5)],
                f"{form}_passed": mean - half <= 0 if case.p else farthest < spread,
            }
    return {**record, "cpu_s": round(sum(run["cpu_s"] for run in runs.values()), 1)}


def find_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The mean of the differences, and half of its 95 % confidence interval."""
    number = len(differences)
    return statistics.fmean(differences), QUANTILES[number] * statistics.stdev(differences) / math.sqrt(number)


def smooth(losses: Sequence[float]) -> list[float]:
    """Means over windows of steps."""
    return [
        round(statistics.fmean(losses[first : first + WINDOW]), 4)
        for first in range(0, len(losses) - WINDOW + 1, WINDOW)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="default all")
    parser.add_argument("--again", action="store_true", help="train what is there, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once (default: one a core)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "training_proof", help="data and ended runs")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.again:
        shutil.rmtree(folder, ignore_errors=True)
    torch.set_num_threads(1)
    work = functools.partial(measure, folder=folder, jobs=args.jobs)
    measure_missing(OUTPUT, args.only or CASES, work, again=args.again)


if __name__ == "__main__":
    main()
