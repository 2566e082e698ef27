"""Holds one case of the grid against its witnesses.

The rule is the house's: error(ours) <= 2 x error(witness) + 1 ulp of the largest exact value, of the losses of all
tokens and of each parameter's gradient, every one put together from the parts that the ranks hold.

- dropout 0: exact is stock Megatron in float64 on one process, the witness stock Megatron of the same dtype in the same
  layout, both without recomputation. Stock has no context parallelism on a CPU: there each context-parallel rank runs
  the witness alone. It takes no packed rows either: their documents then run one after the other, in rows of their own.
- dropout 0.1: exact is Tempo in float64 on one process without recomputation, the witness the larger of two: the same
  choice and dtype on one process, and, for what a layout alone rounds, stock in the same layout at dropout 0. The masks
  of all ranks together are, bit for bit, those of the one process. Stock draws masks that depend on the layout: it is
  only run.
- Models are small, and the largest error of a few numbers is a matter of luck, on both sides. A case that is over its
  limit with one draw of the weights is run with DRAWS of them, and the sum of its errors is held to the sum of the
  limits, in the case's layout only.
- In place GELU has its floor, by which it misses GELU's derivative at most: that times the largest exact value.
- A norm in place differentiates from the normalised x that y, rounded, carries, which is off by half an ulp (see
  tempo_kernels.norm): in float32, whose bound is that fine, the gradient of its weight, a sum of dy * x over tokens,
  may be off by half of float32's round-off times the sum of abs(dy * x), which the exact run measures.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from dropout_masks import Masks, compare_masks
from megatron.core import parallel_state
from witness import ulp

from grid.cases import ONE_PROCESS, Case
from grid.run_model import Found, run_model

# The largest error of GELU' in place, as tempo_kernels.gelu states it.
GELU_FLOOR = {"fp32": 5.1e-5, "bf16": 1.6e-2}
LIMIT_OF_BYTES = 0.01
DRAWS = 16
Errors = dict[str, tuple[float, float]]
"""Gradient or losses -> (error, limit)."""


def name_exact(case: Case) -> Case:
    """The run on one process in float64 that is exact for a case."""
    choice = "off" if case.dropout == 0 else "recompute"
    return dataclasses.replace(_name_alone(name_one_process(case)), choice=choice, dtype="fp64")


def name_one_process(case: Case) -> Case:
    """The case itself on one process, without recomputation; its layout says how many layers and micro batches."""
    return dataclasses.replace(case, layout=dataclasses.replace(ONE_PROCESS, pp=case.layout.pp), recompute="none")


def _name_alone(case: Case) -> Case:
    """The case with the documents of a packed row in rows of their own."""
    return dataclasses.replace(case, documents="alone") if case.documents else case


def _name_stock(case: Case) -> Case:
    """Stock in the case's layout and dtype at dropout 0, without recomputation, packed rows and context parallelism."""
    layout = dataclasses.replace(case.layout, cp=1, comm_type="")
    plain = dataclasses.replace(case, layout=layout, recompute="none", choice="off", dropout=0.0)
    return _name_alone(plain)


def find_file(folder: Path, case: Case) -> Path:
    return folder / (case.key.replace(" | ", "-").replace(" ", "_").replace(",", "") + ".pt")


def save_reference(case: Case, folder: Path) -> None:
    """Run a case of `list_references` on one process, whatever its layout says, and write what it found."""
    found = run_model(case, is_stock=case.choice == "off", records=False)
    torch.save(found, find_file(folder, case))


class Judge:
    """Holds cases against their witnesses. Those of one process lie in `folder`. A case whose error is over its limit
    is judged again, by the sums over `draws` draws of the weights."""

    def __init__(self, folder: Path, draws: int = DRAWS) -> None:
        self._folder, self._draws = folder, draws
        self._loaded: dict[Case, Found] = {}
        self._stock: dict[Case, Found] = {}

    def judge(self, case: Case) -> dict[str, Any]:
        """What this rank says: {"status": "passed", "ratio": of an error to its limit, ...}, or "failed" and why."""
        if case.is_refused:
            return _judge_refusal(case)
        found = run_model(case)
        complaints = [
            f"{stack} keeps {measured} bytes, and the formula says {counted}"
            for stack, (measured, counted) in found.kept.items()
            if abs(counted - measured) > LIMIT_OF_BYTES * measured
        ]
        result: dict[str, Any] = {"status": "passed", "kept": found.kept, "ratio": 0.0, "worst": ""}
        if case.dropout > 0 and case.choice == "off":
            values = [*found.gradients.values(), *([] if found.losses is None else [found.losses])]
            complaints += [] if all(map(_is_finite, values)) else ["a loss or a gradient is not finite"]
        else:
            ratio, worst = _find_worst(self._compare(case, found))
            result.update(ratio=ratio, worst=worst)
            if _is_true_somewhere(ratio > 1) and not _needs_one_stage(_name_stock(case)):
                ratio, worst = _find_worst(self._compare_draws(case))
                result.update(ratio=ratio, worst=worst, draws=self._draws)
            complaints += [] if ratio <= 1 else [f"the error of {worst} is {ratio:.2f} of its limit"]
        if case.dropout > 0 and case.choice != "off":
            complaints += self._compare_masks(case, found.masks)
            if case.layout == ONE_PROCESS:
                complaints += self._list_changes(case, found)
        if complaints:
            result.update(status="failed", message="; ".join(complaints))
        return result

    def _compare(self, case: Case, found: Found) -> Errors:
        exact = self._load(name_exact(case))
        witnesses = [self._run_stock(case)]
        if case.dropout > 0:
            witnesses.append((exact, self._load(name_one_process(case))))
        return _measure_errors(case, found, exact, witnesses)

    def _compare_draws(self, case: Case) -> Errors:
        """The sums over several draws of the weights; what is exact runs in the case's layout too, without packed rows
        and context parallelism."""
        witness = _name_stock(case)
        true = dataclasses.replace(witness, dtype="fp64")
        exact_case = dataclasses.replace(true, choice="recompute", dropout=case.dropout)
        sums: dict[str, list[float]] = {}
        for draw in range(self._draws):
            stock = run_model(true, is_stock=True, records=False, draw=draw)
            witnesses = [(stock, run_model(witness, is_stock=True, records=False, draw=draw))]
            exact = stock if case.dropout == 0 else run_model(exact_case, records=False, draw=draw)
            found = run_model(case, records=False, draw=draw)
            for name, pair in _measure_errors(case, found, exact, witnesses).items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0], total[1] = total[0] + pair[0], total[1] + pair[1]
        return {name: (error, limit) for name, (error, limit) in sums.items()}

    def _list_changes(self, case: Case, found: Found) -> list[str]:
        """What Megatron's recomputation changed on one process, where it may change nothing, not one bit."""
        plain = _list_values(self._load(name_one_process(case)))
        changed = [name for name, value in _list_values(found).items() if not torch.equal(value, plain[name])]
        return [f"recomputation changes {', '.join(changed)}"] if changed else []

    def _run_stock(self, case: Case) -> tuple[Found, Found]:
        """(exact, found) of stock in the case's layout and dtype at dropout 0, without recomputation."""
        stock = _name_stock(case)
        if stock not in self._stock:
            self._stock[stock] = (
                self._load(name_one_process(stock))
                if _needs_one_stage(stock)
                else run_model(stock, is_stock=True, records=False)
            )
        return self._load(name_exact(stock)), self._stock[stock]

    def _load(self, case: Case) -> Found:
        if case not in self._loaded:
            self._loaded[case] = torch.load(find_file(self._folder, case), weights_only=False)
        return self._loaded[case]

    def _compare_masks(self, case: Case, masks: Masks) -> list[str]:
        """What is wrong with the masks of all ranks together; the same on each."""
        num_wrong, is_drawn = compare_masks(masks, self._load(name_exact(case)).masks, is_causal=case.family != "BERT")
        wrong, drawn = _find_largest(torch.tensor([num_wrong])), _find_largest(torch.from_numpy(is_drawn))
        complaints = [f"{int(wrong)} elements of masks are not those of one process"] if wrong else []
        if not drawn.all():
            complaints.append(f"{int((drawn == 0).sum())} of {len(drawn)} elements of masks are drawn by no rank")
        return complaints


def _needs_one_stage(case: Case) -> bool:
    """Whether a schedule cannot run the case: stages would send documents of several lengths to each other."""
    return case.documents == "alone" and case.layout.pp > 1


def _measure_errors(case: Case, found: Found, exact: Found, witnesses: list[tuple[Found, Found]]) -> Errors:
    """witnesses: pairs of what is exact and what the witness found."""
    is_in_place = case.choice in ("inplace", "auto")
    floor = GELU_FLOOR[case.dtype] if is_in_place and case.family != "Llama" else 0.0
    sums = exact.norm_sums if is_in_place and case.dtype == "fp32" else {}
    errors = {}
    for name, ours in _list_values(found).items():
        true = _list_values(exact)[name]
        allowed = max(_find_error(_list_values(w)[name], _list_values(e)[name]) for e, w in witnesses)
        largest = true.abs().max()
        limit = 2 * allowed + ulp(largest, ours.dtype).item() + floor * largest.item()
        limit += torch.finfo(torch.float32).eps / 2 * sums.get(name, 0.0)
        errors[name] = _find_error(ours, true), limit
    return errors


def _find_worst(errors: Errors) -> tuple[float, str]:
    """(the largest error as a part of its limit, of what)."""
    ratios = {name: error / limit for name, (error, limit) in errors.items()}
    worst = max(ratios, key=lambda name: ratios[name] if math.isfinite(ratios[name]) else math.inf)
    return ratios[worst], worst


def _is_true_somewhere(here: bool) -> bool:
    """Whether a rank of the model has True: what they do next, they do together."""
    return bool(_find_largest(torch.tensor([int(here)])).item())


def _find_largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest, element by element, of all ranks of the model."""
    for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
    return tensor


def _judge_refusal(case: Case) -> dict[str, Any]:
    try:
        run_model(case)
    except ValueError as error:
        text = str(error)
        is_sentence = "\n" not in text and ". " not in text and "tempo.activation" in text
        return {"status": "refused" if is_sentence else "failed", "message": text}
    return {"status": "failed", "message": "expected a refusal, and the model ran"}


def _list_values(found: Found) -> dict[str, torch.Tensor]:
    return found.gradients | ({} if found.losses is None else {"the losses": found.losses})


def _find_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return (value.double() - exact.double()).abs().max().item()


def _is_finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite().all())


def list_references(cases: list[Case]) -> list[Case]:
    """The runs on one process that `cases` are held against."""
    found: dict[Case, None] = {}
    for case in cases:
        if case.is_refused or (case.dropout > 0 and case.choice == "off"):
            continue
        found[name_exact(case)] = found[name_exact(dataclasses.replace(case, dropout=0.0))] = None
        if case.dropout > 0:
            found[name_one_process(case)] = None
        if _needs_one_stage(stock := _name_stock(case)):
            found[name_one_process(stock)] = None
    return list(found)
