"""Compares what Transformer Engine's modules really keep with what the estimate's stand-ins for them keep."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import __version__ as MEGATRON_VERSION
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.utils import get_te_version

from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import record_chunk
from tempo_megatron.memory.tape.follower import Follower
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.settings.config import TempoConfig

_TOLERANCE = 0.01
_IN_MLP = ("pre_mlp_layernorm", "mlp")


@dataclasses.dataclass(frozen=True)
class KeptByEngine:
    """What layers of Transformer Engine's modules keep of one sample."""

    transformer_engine: str
    megatron_core: str
    device: str
    kept_bytes: dict[str, dict[str, int]]
    """A model of configs/model -> "attention" or "mlp", with the norm in front of it -> bytes of one layer."""


def measure_engine(files: Mapping[str, Path], device: str) -> KeptByEngine:
    """Run one layer of each model forward on the device. Other families than GPT, experts and latent attention are left
    out."""
    shapes = {name: _read_one_layer(path) for name, path in files.items()}
    is_gpu = device == "cuda"
    if not is_gpu:
        cpu.use_cpu()
    return KeptByEngine(
        transformer_engine=str(get_te_version()),
        megatron_core=MEGATRON_VERSION,
        device=torch.cuda.get_device_name() if is_gpu else device,
        kept_bytes={name: _measure_layer(shape, device) for name, shape in shapes.items() if shape is not None},
    )


def read_engine(path: str | Path) -> KeptByEngine:
    """Raises ValueError where the file is none that `bench --kept-bytes` wrote."""
    try:
        return KeptByEngine(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"--kept-bytes {path} cannot be read ({error}); give a file that tempo-megatron bench --kept-bytes wrote"
        ) from error


def describe_stand_ins(measured: KeptByEngine, known: Mapping[str, Path]) -> str:
    """One line: which stand-ins keep something else than the modules, by more than 1 %, or that none does."""
    worst: dict[str, tuple[float, str]] = {}
    for name, parts in measured.kept_bytes.items():
        shape = _read_one_layer(known[name]) if name in known else None
        for part, num_bytes in _simulate_layer(shape).items() if shape is not None else ():
            off = num_bytes / parts[part] - 1
            if abs(off) > max(_TOLERANCE, abs(worst.get(part, (0.0, ""))[0])):
                worst[part] = off, f"{part}: {num_bytes:,} bytes a layer of {name}, where {parts[part]:,} were measured"
    of = f"Transformer Engine {measured.transformer_engine} on {measured.device}"
    if not worst:
        return f"the stand-ins keep what {of} keeps, within {_TOLERANCE:.0%}"
    return f"stale since {of}: the stand-in of {'; of '.join(text for _, text in worst.values())}"


def _read_one_layer(path: Path) -> ModelShape | None:
    shape = make_shape(**{"vocab_size": 128, **read_shape_file(path)})
    is_known = shape.family == "gpt" and shape.num_experts is None and not shape.multi_latent_attention
    return dataclasses.replace(shape, num_layers=1) if is_known else None


def _simulate_layer(shape: ModelShape) -> dict[str, int]:
    run = Run(model=shape, tempo=TempoConfig.off(), stock="transformer_engine")
    found = {"attention": 0, "mlp": 0}
    for saved in record_chunk(run)[0]["decoder", 0]:
        name = saved.operation.removeprefix("decoder.layers.0.")
        found["mlp" if name.startswith(_IN_MLP) else "attention"] += saved.num_bytes
    return found


def _measure_layer(shape: ModelShape, device: str) -> dict[str, int]:
    """The bytes that attention and MLP leave; the layer's output counts for its input, which was there before."""
    is_cpu = device == "cpu"
    with simulate_layout(1), torch.compiler.set_stance("force_eager"):
        model_parallel_cuda_manual_seed(1234)
        settings = {"fuse_swiglu": True, "perform_initialization": False, "use_cpu_initialization": is_cpu}
        config = build_transformer_config(shape, dtype=torch.bfloat16, **settings)
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_layernorm)
        layer: Any = build_module(spec, config=config, layer_number=1).to(device=device, dtype=torch.bfloat16).train()
        hidden = torch.randn(shape.seq_length, 1, shape.hidden_size, dtype=torch.bfloat16, device=device)
        given: dict[str, Any] = {"attention_mask": None}
        if shape.position_embedding_type != "learned_absolute":
            rotary = RotaryEmbedding(shape.kv_channels, 1.0, use_cpu_initialization=is_cpu)
            given["rotary_pos_emb"] = rotary(shape.seq_length).to(device)

        def run_forward(count: Callable[[], int]) -> list[int]:
            levels = [count()]
            hook = layer.mlp.register_forward_pre_hook(lambda *_: levels.append(count()))
            output = layer(hidden.requires_grad_(), **given)  # noqa: F841, so that it is there still
            levels.append(count())
            hook.remove()
            return levels

        # The first time, workspaces that stay are taken, too.
        for _ in range(2):
            if is_cpu:
                with Follower(*layer.parameters()) as seen:
                    levels = run_forward(lambda seen=seen: seen.alive_bytes)  # type: ignore[misc]
            else:
                levels = run_forward(torch.cuda.memory_allocated)
    start, between, end = levels
    return {"attention": between - start, "mlp": end - between}
