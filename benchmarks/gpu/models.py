"""Trains whole models in plain PyTorch, stock and through tempoize: what they keep, what fits, how fast a step is.

No Megatron is needed: the models are those of transformers, with random weights in bfloat16. What the estimate's
mechanism says of them beforehand stands in predicted.json, which `gpu_suite.py predict` writes on any machine.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpu.steps import LeftOut, Step, Wrong

PREDICTED = Path(__file__).with_name("predicted.json")
GIB = 2**30
ROUNDS, WARM_UPS = 8, 3
MOST = 1024
"""Samples of the largest batch that is tried."""


class Model(NamedTuple):
    name: str
    kind: str
    """The class of transformers."""
    config: str
    sizes: dict[str, Any]
    batch: int
    length: int
    vocabulary: int

    def shrink(self) -> Model:
        """The same kind in a size that a CPU runs at once."""
        layers, tiny = next(name for name in self.sizes if "layer" in name), {}
        for name, value in self.sizes.items():
            is_width = isinstance(value, int) and value >= 64
            tiny[name] = 2 if name == layers else 64 if is_width else value
        return self._replace(sizes=tiny | {"vocab_size": 96}, batch=2, length=16, vocabulary=96)


_BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_LLAMA = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = Model(
    "GPT-2 345M", "GPT2LMHeadModel", "GPT2Config",
    {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024, "vocab_size": 50304}, 8, 1024, 50304,
)  # fmt: skip
BERT = Model("BERT-large", "BertForMaskedLM", "BertConfig", {**_BERT, "vocab_size": 30592}, 32, 512, 30592)
LLAMA = Model("Llama 1B", "LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "vocab_size": 128256}, 4, 2048, 128256)
FORMS = ("stock", "stock compiled", "tempo")


def build(model: Model, form: str, device: str) -> nn.Module:
    """Builds the model in one of FORMS, in training."""
    import transformers

    from tempo_torch import tempoize

    config = getattr(transformers, model.config)(**model.sizes, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            made: nn.Module = getattr(transformers, model.kind)(config).train()
    finally:
        torch.set_default_dtype(before)
    # What its check gave back to stock would be measured as Tempo's; `compare_with_stock` has the check.
    return tempoize(made, seed=1, check="off") if form == "tempo" else made


def make_batch(model: Model, num_samples: int, device: str) -> dict[str, Tensor]:
    ids = torch.randint(5, model.vocabulary, (num_samples, model.length), device=device)
    return {"input_ids": ids, "labels": ids}


def compare_with_stock(model: Model, device: str) -> dict[str, Any]:
    """Lets tempoize compare the model with its stock modules; raises Wrong if something differs."""
    from tempo_torch import report_on, tempoize

    report = report_on(tempoize(build(model, "stock", device), seed=1))
    differing = [
        f"{one.operation}: {one.why}" for one in report.left if " stock: " in one.why or " stock runs: " in one.why
    ]
    if differing or not report.checked.startswith("checked"):
        raise Wrong(differing[0] if differing else report.checked)
    return {"answer": report.checked}


class Trainee:
    """A model with its optimizer."""

    def __init__(self, model: Model, form: str, device: str) -> None:
        self.model, self.form, self.device = model, form, device
        self.module = build(model, form, device)
        fused = {"fused": True} if device == "cuda" else {}
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, **fused)
        self._call: Callable[..., Any] = torch.compile(self.module) if form == "stock compiled" else self.module

    def step(self, batch: dict[str, Tensor]) -> None:
        self._call(**batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tokens_per_s(self, batch: dict[str, Tensor]) -> float:
        _wait(self.device)
        start = time.perf_counter()
        self.step(batch)
        _wait(self.device)
        return batch["input_ids"].numel() / (time.perf_counter() - start)

    def fits(self, num_samples: int) -> bool:
        try:
            self.step(make_batch(self.model, num_samples, self.device))
            _wait(self.device)
        except torch.OutOfMemoryError:
            self._optimizer.zero_grad()
            torch.cuda.empty_cache()
            return False
        return True


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_memory(model: Model, device: str) -> dict[str, Any]:
    """Compares what forward keeps and what a step takes at most, stock and Tempo, with what was predicted."""
    predicted = json.loads(PREDICTED.read_text(encoding="utf-8")).get(model.name, {}) if PREDICTED.exists() else {}
    found: dict[str, Any] = {}
    for form in ("stock", "tempo"):
        trainee, batch = Trainee(model, form, device), make_batch(model, model.batch, device)
        trainee.step(batch)  # whatever compiles or fills a cache does so here
        _wait(device)
        if device != "cuda":
            trainee.module(**batch).loss.backward()
            raise LeftOut("a CPU's allocator does not count")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = trainee.module(**batch).loss
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        found[form] = {"kept_bytes": kept, "peak_bytes": torch.cuda.max_memory_allocated() - before}
        del trainee, loss
        torch.cuda.empty_cache()
    lines = []
    for name in ("kept_bytes", "peak_bytes"):
        sizes = [f"{form} {found[form][name] / GIB:.2f} GiB{_compare(found, predicted, form, name)}" for form in found]
        lines.append(f"{name.partition('_')[0]} {', '.join(sizes)}")
    return {"answer": "; ".join(lines), "measured": found, "predicted": predicted, "batch": model.batch}


def _compare(found: dict[str, Any], predicted: dict[str, Any], form: str, name: str) -> str:
    if form not in predicted or not found[form][name]:
        return ""
    return f" ({100 * (predicted[form][name] / found[form][name] - 1):+.1f} % predicted)"


def find_largest_batch(model: Model, device: str, most: int = MOST) -> dict[str, Any]:
    """Finds by bisection how many samples a step has at most, stock and Tempo, and how fast such a step is."""
    largest, rates = {}, {}
    for form in ("stock", "tempo"):
        trainee, fits, too_many = Trainee(model, form, device), 0, model.batch
        while too_many < most and trainee.fits(too_many):
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > max(1, fits // 32):
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if trainee.fits(middle) else (fits, middle)
        if not fits:
            raise Wrong(f"{form} has no room for one sample")
        batch = make_batch(model, fits, device)
        largest[form] = fits
        rates[form] = statistics.median(trainee.tokens_per_s(batch) for _ in range(ROUNDS))
        del trainee, batch
        torch.cuda.empty_cache()
    text = f"stock {largest['stock']} samples, Tempo {largest['tempo']}; {_compare_rates(rates)}"
    return {"answer": text, "largest_batch": largest, "tokens_per_s": rates}


def time_steps(model: Model, device: str) -> dict[str, Any]:
    """Compares tokens/s of training steps of all forms at one batch, in turn, with the optimizer."""
    batch = make_batch(model, model.batch, device)
    trainees = {form: Trainee(model, form, device) for form in FORMS}
    rates: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(WARM_UPS + ROUNDS):
        for form, trainee in trainees.items():
            rates[form].append(trainee.tokens_per_s(batch))
    medians = {form: statistics.median(found[WARM_UPS:]) for form, found in rates.items()}
    return {"answer": _compare_rates(medians), "tokens_per_s": medians, "batch": model.batch, "all": rates}


def _compare_rates(rates: dict[str, float]) -> str:
    text = ", ".join(f"{form} {rate:,.0f} tokens/s" for form, rate in rates.items())
    return f"{text}; Tempo / stock {rates['tempo'] / rates['stock']:.3f}"


def list_memory_steps(device: str) -> Iterator[Step]:
    """Yields the steps of "Is the memory what we say?"."""
    models = {model.name: model if device == "cuda" else model.shrink() for model in (GPT2, LLAMA)}
    for name, sized in models.items():
        yield Step(f"{name} beside stock", "right", 15.0, functools.partial(compare_with_stock, sized, device))
    for name, sized in models.items():
        yield Step(f"memory of {name}", "memory", 12.0, functools.partial(measure_memory, sized, device))
    sized, most = (GPT2, MOST) if device == "cuda" else (GPT2.shrink(), 4)
    run = functools.partial(find_largest_batch, sized, device, most)
    yield Step(f"largest batch of {GPT2.name}", "memory", 45.0, run)


def list_speed_steps(device: str) -> Iterator[Step]:
    """Yields the steps of "Is it fast?" that train whole models."""
    for model in (GPT2, BERT):
        sized = model if device == "cuda" else model.shrink()
        yield Step(f"steps of {model.name}", "fast", 50.0, functools.partial(time_steps, sized, device))


def predict() -> dict[str, dict[str, dict[str, int]]]:
    """Follows a step of every model on tensors without memory, as `tempo-megatron estimate` does; returns its bytes."""
    return {model.name: {form: follow(model, form) for form in ("stock", "tempo")} for model in (GPT2, LLAMA)}


def follow(model: Model, form: str) -> dict[str, int]:
    """Returns what a step of the model keeps and takes at most, on tensors without memory."""
    from tempo_kernels.gelu import make_tables
    from tempo_megatron.memory.fake_tensors import use_fake_tensors
    from tempo_megatron.memory.simulated.device import on_device
    from tempo_megatron.memory.storages import PeakBytes

    make_tables()
    module = build(model, form, "meta")
    with use_fake_tensors():
        batch, fakes = make_batch(model, model.batch, "cpu"), {}
        for each in module.modules():
            for tensors in (each._parameters, each._buffers):
                for name, t in tensors.items():
                    if t is not None and id(t) not in fakes:
                        fake = torch.empty(t.shape, dtype=t.dtype)
                        fakes[id(t)] = t, nn.Parameter(fake) if isinstance(t, nn.Parameter) else fake
                    tensors[name] = None if t is None else fakes[id(t)][1]
        seen = PeakBytes(*module.parameters(), *module.buffers(), *batch.values())
        with on_device("local", seen), seen, _FlashAttention():
            loss = module(**batch).loss
            kept = seen.count_alive()
            loss.backward()
    return {"kept_bytes": kept, "peak_bytes": seen.peak}


class _FlashAttention(TorchFunctionMode):
    """On a GPU torch's attention keeps no mask of its dropout; on a CPU only attention without dropout keeps none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**(kwargs or {}), **({"dropout_p": 0.0} if func is F.scaled_dot_product_attention else {})}
        return func(*args, **given)
