"""Trains whole models in plain PyTorch, stock and through tempoize: what they keep, what fits, how fast a step is.

No Megatron is needed: the models are those of transformers, with random weights in bfloat16. What the estimate's
mechanism says of them beforehand stands in predicted.json, which `gpu_suite.py predict` writes on any machine.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu.steps import LeftOut, Step, Wrong
from tempo_kernels import attention
from tempo_kernels.linear_cross_entropy import CHUNK_BYTES, use_chunk_bytes
from tempo_kernels.linear_cross_entropy import OPERATIONS as HEAD_OPERATIONS
from tempo_kernels.opaque import Opaque, simulate

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


def find_largest_batch(model: Model, form: str, device: str, most: int = MOST) -> dict[str, Any]:
    """Finds by bisection how many samples a step of this form has at most, and how fast such a step is."""
    trainee, fits, too_many = Trainee(model, form, device), 0, model.batch
    while too_many < most and trainee.fits(too_many):
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > max(1, fits // 32):
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if trainee.fits(middle) else (fits, middle)
    if not fits:
        raise Wrong(f"{form} has no room for one sample")
    if form == "stock compiled":  # what is compiled for one size only is faster, and may take a little more
        del trainee
        torch._dynamo.reset()
        trainee = Trainee(model, form, device)
        while fits and not trainee.fits(fits):
            fits -= max(1, fits // 32)
    batch = make_batch(model, fits, device)
    rate = statistics.median(trainee.tokens_per_s(batch) for _ in range(ROUNDS))
    text = f"{fits} samples, {rate:,.0f} tokens/s"
    return {"answer": text, "model": model.name, "form": form, "largest_batch": fits, "tokens_per_s": {form: rate}}


def time_steps(model: Model, device: str) -> dict[str, Any]:
    """Compares tokens/s of training steps of all forms at one batch, in turn, with the optimizer."""
    batch = make_batch(model, model.batch, device)
    trainees = {form: Trainee(model, form, device) for form in FORMS}
    rates: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(WARM_UPS + ROUNDS):
        for form, trainee in trainees.items():
            rates[form].append(trainee.tokens_per_s(batch))
    medians = {form: statistics.median(found[WARM_UPS:]) for form, found in rates.items()}
    text = ", ".join(f"{form} {rate:,.0f} tokens/s" for form, rate in medians.items())
    text += f"; Tempo / stock {medians['tempo'] / medians['stock']:.3f}"
    return {"answer": text, "tokens_per_s": medians, "batch": model.batch, "all": rates}


def list_memory_steps(device: str) -> Iterator[Step]:
    """Yields the steps of "Is the memory what we say?"."""
    models = {model.name: model if device == "cuda" else model.shrink() for model in (GPT2, LLAMA)}
    for name, sized in models.items():
        yield Step(f"{name} beside stock", "right", 15.0, functools.partial(compare_with_stock, sized, device))
    for name, sized in models.items():
        yield Step(f"memory of {name}", "memory", 12.0, functools.partial(measure_memory, sized, device))
    yield from _list_largest(GPT2, ("stock", "tempo"), "memory", device)


def _list_largest(model: Model, forms: Sequence[str], part: str, device: str) -> Iterator[Step]:
    sized, most = (model, MOST) if device == "cuda" else (model.shrink(), 4)
    for form in forms:
        run = functools.partial(find_largest_batch, sized, form, device, most)
        yield Step(f"largest batch of {model.name}, {form}", part, 45.0 if "compiled" in form else 18.0, run)


def list_speed_steps(device: str) -> Iterator[Step]:
    """Yields the steps of "Is it fast?" that train whole models."""
    for model in (GPT2, BERT):
        sized = model if device == "cuda" else model.shrink()
        yield Step(f"steps of {model.name}", "fast", 45.0, functools.partial(time_steps, sized, device))
    yield from _list_largest(BERT, ("stock", "tempo"), "fast", device)
    for model in (GPT2, BERT):
        yield from _list_largest(model, ("stock compiled",), "fast", device)


def predict() -> dict[str, dict[str, dict[str, int]]]:
    """Follows a step of every model on tensors without memory, as `tempo-megatron estimate` does; returns its bytes."""
    return {model.name: {form: follow(model, form) for form in ("stock", "tempo")} for model in (GPT2, LLAMA)}


def follow(model: Model, form: str) -> dict[str, int]:
    """Returns what a step of the model keeps and takes at most, on tensors without memory."""
    module = build(model, form, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch, fakes = make_batch(model, model.batch, "cpu"), {}
        for each in module.modules():
            for tensors in (each._parameters, each._buffers):
                for name, t in tensors.items():
                    if t is not None and id(t) not in fakes:
                        fake = torch.empty(t.shape, dtype=t.dtype)
                        fakes[id(t)] = t, nn.Parameter(fake) if isinstance(t, nn.Parameter) else fake
                    tensors[name] = None if t is None else fakes[id(t)][1]
        known = [*module.parameters(), *module.buffers(), *batch.values()]
        with simulate(_call_on_gpu), use_chunk_bytes(CHUNK_BYTES["cuda"]), _Bytes(known) as seen, _Flash():
            loss = module(**batch).loss
            kept = seen.count_alive()
            loss.backward()
    return {"kept_bytes": kept, "peak_bytes": seen.peak}


class _Bytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, but for those of `known` tensors."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def count_alive(self) -> int:
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, num_made = func(*args, **(kwargs or {})), len(self._alive)
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_meta and t.untyped_storage()._cdata not in self._known:
                storage = t.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if len(self._alive) > num_made:
            self.peak = max(self.peak, self.count_alive())
        return out


def _call_on_gpu(function: Any, *inputs: Any, **numbers: Any) -> Any:
    """A kernel makes its results only, and attention's backward what it sums up."""
    if function in HEAD_OPERATIONS:
        return function.call(*inputs, backend=_HeadKernels)
    if not isinstance(function, Opaque):
        return None
    results = function.trace(*inputs)
    if function is attention.OPERATIONS[1] and inputs[2] is not None:
        held = [torch.empty(size, dtype=torch.uint8) for size in attention.list_gpu_workspaces(inputs, 9, 132)]
        del held
    return results


class _HeadKernels:
    """What the loss head's kernels make of a chunk's logits."""

    @staticmethod
    def compute_statistics(logits: Tensor, columns: Tensor, shares: Any) -> Tensor:
        return logits.new_empty(shares.num_statistics, logits.size(0), dtype=torch.float32)

    @staticmethod
    def write_gradient_(logits: Tensor, rows: Any, shares: Any) -> None:
        """It writes over the logits."""


class _Flash(TorchFunctionMode):
    """On a GPU torch's attention keeps no mask of its dropout; on a CPU only attention without dropout keeps none.
    torch's dropout keeps a byte per element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.dropout:
            return _drop(*args, **given)
        return func(*args, **(given | ({"dropout_p": 0.0} if func is F.scaled_dot_product_attention else {})))


def _drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x
