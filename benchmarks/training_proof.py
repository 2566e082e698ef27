"""Training with each form of Tempo beside stock, on real text: the last losses of every seed, in bf16 and in fp16.

python benchmarks/training_proof.py        # 18 runs of 500 steps; the result in benchmarks/results/

A small Megatron GPT on the sources of this machine's Python, 16-bit weights and float32 master weights in AdamW, with
dynamic loss scaling for fp16; no dropout, so that only arithmetic differs. A form passes where, seed by seed, it ends
closer to stock than stock's own seeds lie apart. Finished runs are kept and not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from measurements import RESULTS, ROOT, append_records, describe_cpu_run
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from tqdm import tqdm

from tempo_megatron import TempoConfig, cpu, tempo_block_spec
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import make_shape
from tempo_megatron.training.plots import plot_losses

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512}
BATCH_SIZE, WARMUP_STEPS, HIGHEST_LR, LAST_STEPS = 8, 50, 1e-3, 20
FORMS = {
    "stock": TempoConfig.off(),
    "inplace": TempoConfig(),
    "recompute": TempoConfig(activation="recompute", norm="recompute"),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossScale:
    """Dynamic loss scaling: halved where a gradient overflows, and that step is left out; doubled after 100 without."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_dynamic = dtype == torch.float16
        self.value, self.steps_since, self.overflows = 65536.0 if self.is_dynamic else 1.0, 0, 0

    def update(self, is_finite: bool) -> None:
        self.steps_since = self.steps_since + 1 if is_finite else 0
        self.overflows += not is_finite
        if self.is_dynamic:
            self.value *= 0.5 if not is_finite else 2.0 if self.steps_since % 100 == 0 else 1.0


def prepare_data(folder: Path) -> str:
    """The prefix of the data set; made where it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / "stdlib")
    command = [sys.executable, "launch/prepare_data.py", "--input-stdlib", "--max-bytes", "4M", "--vocab-size", "512"]
    subprocess.run([*command, "--output-prefix", prefix, "--skip-existing"], cwd=ROOT, check=True)
    return prefix


def batches(data: str, seed: int, steps: int) -> Tensor:
    """[steps, b, s + 1] tokens: windows at random places of all documents after one another."""
    dataset = IndexedDataset(data)
    tokens = torch.cat([torch.from_numpy(dataset[index].astype("int64")) for index in range(len(dataset))])
    length = SIZES["seq_length"] + 1
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(tokens.numel() - length, (steps, BATCH_SIZE, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def build(form: str, dtype: str, seed: int) -> GPTModel:
    shape = make_shape(**SIZES, attention_dropout=0.0, hidden_dropout=0.0)
    config = build_transformer_config(shape, dtype=DTYPES[dtype])
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    spec = tempo_block_spec(config, FORMS[form])
    sizes = {"vocab_size": SIZES["vocab_size"], "max_sequence_length": SIZES["seq_length"]}
    return GPTModel(config, spec, share_embeddings_and_output_weights=True, **sizes).to(DTYPES[dtype]).train()


def train(job: tuple[str, str, int], data: str, metrics: Path, steps: int) -> None:
    """One run; writes its losses to `metrics` when it is done."""
    dtype, form, seed = job
    torch.set_num_threads(1)
    cpu.use_cpu()
    with simulate_layout(1):
        model = build(form, dtype, seed)
        parameters = list(model.parameters())
        masters = [p.detach().float() for p in parameters]
        optimizer = torch.optim.AdamW(masters, lr=HIGHEST_LR, betas=(0.9, 0.95), weight_decay=0.1)
        scale, records = LossScale(DTYPES[dtype]), []
        positions = torch.arange(SIZES["seq_length"]).expand(BATCH_SIZE, -1)
        hidden = torch.ones(1, 1, *[SIZES["seq_length"]] * 2, dtype=torch.bool).triu(1) if form == "stock" else None
        for step, tokens in enumerate(batches(data, seed, steps)):
            progress = max(0.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
            shape = min(1.0, (step + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = HIGHEST_LR * shape
            loss = model(tokens[:, :-1].contiguous(), positions, hidden, labels=tokens[:, 1:].contiguous()).mean()
            (loss * scale.value).backward()
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float() / scale.value, None
            norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
            if is_finite := bool(norm.isfinite()):
                optimizer.step()
                with torch.no_grad():
                    for master, parameter in zip(masters, parameters, strict=True):
                        parameter.copy_(master)
            records.append({"kind": "train", "iteration": step + 1, "loss": loss.item(), "loss_scale": scale.value})
            scale.update(is_finite)
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def judge(runs: dict[tuple[str, int], Path], dtype: str, seeds: list[int], steps: int) -> dict[str, Any]:
    """One record: the last losses of every run of a dtype, and whether each form stayed within stock's spread."""
    losses = {run: [json.loads(line)["loss"] for line in path.read_text().splitlines()] for run, path in runs.items()}
    ends = {run: statistics.fmean(values[-LAST_STEPS:]) for run, values in losses.items()}
    stock = [ends["stock", seed] for seed in seeds]
    spread = max(stock) - min(stock)
    record: dict[str, Any] = {"dtype": dtype, "steps": steps, "seeds": seeds, "stock_spread": round(spread, 5)}
    for form in FORMS:
        record[f"{form}_losses"] = [round(ends[form, seed], 5) for seed in seeds]
        if form != "stock":
            farthest = max(abs(ends[form, seed] - ends["stock", seed]) for seed in seeds)
            record |= {f"{form}_farthest_from_stock": round(farthest, 5), f"{form}_passed": farthest < spread}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="default %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES), help="default both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once (default: one a core)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "training_proof", help="data and metrics")
    args = parser.parse_args()
    folder = args.folder.resolve()
    data = prepare_data(folder)
    metrics = {
        (dtype, form, seed): folder / f"{dtype}-{form}-{seed}-{args.steps}.jsonl"
        for dtype in args.dtypes for seed in args.seeds for form in FORMS
    }  # fmt: skip
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        missing = [(job, path) for job, path in metrics.items() if not path.exists()]
        futures = [pool.submit(train, job, data, path, args.steps) for job, path in missing]
        for future in tqdm(as_completed(futures), total=len(futures), unit="run"):
            future.result()
    for dtype in args.dtypes:
        runs = {(form, seed): path for (run_dtype, form, seed), path in metrics.items() if run_dtype == dtype}
        record = judge(runs, dtype, args.seeds, args.steps)
        record |= {
            "model": {**SIZES, "b": BATCH_SIZE},
            "p": 0.0,
            **describe_cpu_run(),
        }
        print(json.dumps(record, indent=2))
        append_records(RESULTS / "cpu" / "training_proof.jsonl", [record])
        labelled = {f"{form}, seed {args.seeds[0]}": runs[form, args.seeds[0]] for form in FORMS}
        plot_losses(labelled, RESULTS / f"training_proof_{dtype}.png", f"Loss of each form, {dtype}")


if __name__ == "__main__":
    main()
