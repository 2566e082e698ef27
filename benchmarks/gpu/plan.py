"""The steps of `gpu_suite.py first`, in order: is it right, is the memory what we say, is it fast?"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from measurements import ROOT
from torch import Tensor

from gpu import models, right, rivals
from gpu.steps import LeftOut, Step, Wrong

SUITE = ROOT / "benchmarks" / "gpu_suite.py"
CACHE = ROOT / "build" / "gpu_cache"
"""What was compiled, for Triton and Inductor."""
PACKED = CACHE.with_suffix(".tar.gz")
"""The same in one file, to be carried to another machine."""
SITE = ROOT / "build" / "gpu_site"
"""Where the carried wheels are installed."""
PIP = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target", str(SITE)]


class Options(NamedTuple):
    """What a call was asked for."""

    device: str
    """cuda, or cpu for a dry run."""
    folder: Path
    arch: int = 90
    wheels: Path | None = None
    is_interpreted: bool = False
    """Whether the kernels run in Triton's interpreter, on a CPU."""


def list_steps(options: Options) -> Sequence[Step]:
    """Lists the steps, most important first; what has no time left is left to a second call."""
    device = options.device
    sys.path.append(str(SITE))  # behind what the machine has itself
    found = [Step("compile", "right", 75.0, functools.partial(compile_ahead, options))]
    found += right.list_steps(device, options.is_interpreted)
    found += models.list_memory_steps(device)
    found += models.list_speed_steps(device)
    found.append(Step("wheels", "fast", 5.0, functools.partial(install_wheels, options)))
    found += rivals.list_steps(device)
    found.append(Step("20 steps with Megatron and DeepSpeed", "fast", 90.0, functools.partial(pretrain, options)))
    for tool in ("memcheck", "racecheck"):
        found.append(Step(f"compute-sanitizer, {tool}", "right", 30.0, functools.partial(right.sanitize, device, tool)))
    return found


def use_cache() -> None:
    """Lets Triton and Inductor keep what they compile in CACHE, also for the processes that this one starts; a cache
    that was packed on another machine is unpacked."""
    if PACKED.exists() and not CACHE.exists():
        shutil.unpack_archive(PACKED, CACHE)
    for variable, name in {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}.items():
        os.environ.setdefault(variable, str(CACHE / name))


def compile_ahead(options: Options) -> dict[str, Any]:
    """Compiles the kernels of all cases in as many processes as there are cores; raises Wrong if one does not."""
    if options.device != "cuda":
        raise LeftOut("a dry run compiles nothing; --compile-only does")
    num_shares = max(1, (os.cpu_count() or 2) - 1)
    command = [sys.executable, str(SUITE), "compile", "--arch", str(options.arch)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shares = [
        subprocess.Popen(
            [*command, "--share", f"{number}/{num_shares}"], env=environment, stdout=subprocess.PIPE, text=True
        )
        for number in range(num_shares)
    ]
    lines = [line for share in shares for line in share.communicate()[0].splitlines()]
    failed = [line.partition(" ")[2] for line in lines if line.startswith("FAILED ")]
    num_done = sum(line.startswith("COMPILED ") for line in lines)
    if failed or any(share.returncode for share in shares) or not num_done:
        first = failed[0] if failed else "a process ended early"
        raise Wrong(f"{len(failed)} of {num_done + len(failed)} cases do not compile; {first}")
    return {"answer": f"{num_done} cases for sm_{options.arch}"}


def compile_share(arch: int, share: str) -> None:
    """Compiles every n-th case by launching it on a GPU that accepts everything and computes nothing."""
    import fake_gpu

    fake_gpu.CAPABILITY = divmod(arch, 10)
    number, num_shares = map(int, share.split("/"))
    torch.set_num_threads(1)
    stock: Callable[..., Tensor] = torch.addmm

    def addmm(*tensors: Tensor, **given: Any) -> Tensor:
        """A CPU has no products of 16-bit matrices with a float32 result; what it is does not count here."""
        return given["out"] if "out_dtype" in given else stock(*tensors, **given)

    for case in list(right.list_cases())[number::num_shares]:
        try:
            with fake_gpu.fake_gpu(), mock.patch.object(torch, "addmm", addmm):
                right.run(case.function, right.make_inputs(case))
        except Exception as error:  # whatever Triton raises
            print(f"FAILED {case.name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}", flush=True)
        else:
            print(f"COMPILED {case.name}", flush=True)


def install_wheels(options: Options) -> dict[str, Any]:
    """Installs the wheels that were carried; raises LeftOut if Liger, a rival of what follows, is not there then."""
    found = sorted(options.wheels.glob("*.whl")) if options.wheels else []
    if found:
        _run([*PIP, *map(str, found)], dict(os.environ))
        importlib.invalidate_caches()
    if importlib.util.find_spec("liger_kernel") is None:
        raise LeftOut(f"{len(found)} wheels, none of them liger_kernel: operations are not compared with Liger's")
    return {"answer": f"{len(found)} wheels; operations are compared with Liger's, too"}


def pretrain(options: Options) -> dict[str, Any]:
    """Runs 20 steps of GPT-2 345M by launch/pretrain_gpt.py, stock and Tempo; raises LeftOut without the wheels."""
    if options.wheels is None or options.device != "cuda":
        raise LeftOut("megatron-core and deepspeed are not there: --wheels DIR brings them")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(SITE), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    data = options.folder / "data" / "mine"
    data.parent.mkdir(parents=True, exist_ok=True)
    prepare = [sys.executable, "launch/prepare_data.py", "--input", "kernels", "tempo_megatron", "--extensions", ".py"]
    for sources in options.wheels.glob("*.tar.gz"):
        _run([*PIP, "--no-build-isolation", str(sources)], environment)
    _run([*prepare, "--vocab-size", "4096", "--output-prefix", str(data)], environment)
    rates = {}
    for form, more in {"stock": [], "tempo": ["--use-tempo"]}.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "launch/pretrain_gpt.py"]
        command += ["--deepspeed_config", "configs/deepspeed/zero1_bf16.json", "--data-path", str(data), *more]
        command += "--model configs/model/gpt2_345m.json --micro-batch-size 8 --global-batch-size 8".split()
        command += "--train-iters 20 --eval-iters 0 --log-interval 10 --lr 1e-4".split()
        printed = _run(command, environment)
        rates[form] = next((line for line in reversed(printed.splitlines()) if "tokens" in line), "")
    return {"answer": "; ".join(f"{form}: {line.strip()}" for form, line in rates.items())[:300]}


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise LeftOut(f"{Path(command[min(3, len(command) - 1)]).name} ended with {done.returncode}: {last[-1]}"[:300])
    return done.stdout + done.stderr


def describe(steps: Sequence[Step], seconds: float) -> Iterator[str]:
    """Yields the plan: the steps that begin within `seconds`, by what they are expected to take, and the others."""
    spent, left = 0.0, []
    for step in steps:
        if step.expected_s > seconds - spent:
            left.append(step)
            continue
        spent += step.expected_s
        yield f"{step.expected_s:5.1f} s  {step.part}: {step.name}"
    yield f"in all {spent:.0f} of {seconds:.0f} s"
    if left:
        rest = sum(step.expected_s for step in left)
        yield f"left to a second call: {len(left)} steps, {rest:.0f} s: {', '.join(step.name for step in left)}"
