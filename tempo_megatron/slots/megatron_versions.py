"""What differs between the versions of megatron-core: one table, which the slots read, and the names they hang on.

`tests/slots/test_megatron_versions.py` compares Tempo with stock in those from FIRST to LAST; another one is tried,
with a warning. What Tempo builds upon is listed in HOOKS: where a Megatron lacks one, the error names it.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings

import megatron.core
from packaging.version import Version

# Megatron-DeepSpeed carries the core of 0.2.0, which does not say so.
VERSION = Version(getattr(megatron.core, "__version__", "0.2.0"))
FIRST, LAST = "0.14.0", "0.20"
"""The range that has been compared with stock; the patches of a version are taken to be alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that some versions of Megatron do, and what Tempo does about it."""

    name: str
    since: str = ""
    """The first version that does it, its pre-releases included; empty where all from FIRST on do."""

    until: str = ""
    """The first version, its pre-releases included, that no longer does; empty where none."""

    megatron: str
    """What Megatron does in these versions."""

    tempo: str
    """What Tempo does for it."""

    @property
    def is_there(self) -> bool:
        """Whether the Megatron of this process does it."""
        first, end = (Version(f"{version}.dev0") if version else None for version in (self.since, self.until))
        return (first is None or first <= VERSION) and (end is None or end > VERSION)


DIFFERENCES = {
    difference.name: difference
    for difference in (
        Difference(
            name="model_comm_pgs",
            until="0.15",
            megatron="modules are given their process groups as `model_comm_pgs`, and later as `pg_collection`",
            tempo="TempoDotProductAttention takes its group from either, TempoMLP from `tp_group` or `pg_collection`",
        ),
        Difference(
            name="local attention without windows",
            until="0.15",
            megatron="DotProductAttention has no window and no `softmax_type`, and refuses a window itself",
            tempo="asks for both only where they are",
        ),
        Difference(
            name="is_checkpointing",
            since="0.16",
            megatron="`tensor_parallel.random.is_checkpointing()` says whether a forward is a recomputed one",
            tempo="asks autograd in every version: no graph, or inside of a backward",
        ),
        Difference(
            name="group by class",
            until="0.18",
            megatron="a layer hands `tp_group` to the MLP classes it knows, and warns in every layer about any other",
            tempo="TempoMLP finds its group, and the warning is dropped",
        ),
        Difference(
            name="residual decides",
            since="0.17",
            megatron="bias-dropout-add casts x up to the residual's dtype; before, the residual down to x's",
            tempo="does what its Megatron does",
        ),
        Difference(
            name="_scale_logits",
            since="0.17",
            megatron="GPTModel scales its logits where MuP asks for it",
            tempo="the fused loss scales the hidden states by the same number",
        ),
        Difference(
            name="partial for mlp",
            since="0.18",
            megatron="a layer's mlp is `functools.partial(MLP.as_mlp_submodule, ...)`; before, a ModuleSpec",
            tempo="replaces the MLP in either",
        ),
        Difference(
            name="spec may be a function",
            since="0.19",
            megatron="`--spec MODULE NAME` may name a function of the configuration; before, a ready spec only",
            tempo="has one of each: `tempo_block` is the function, `tempo_layer` the spec",
        ),
        Difference(
            name="GPTModel is deprecated",
            since="0.19",
            megatron="GPTModel says in the log that HybridModel, with a spec of Transformer Engine's only, follows it",
            tempo="stands in GPTModel, BertModel and T5Model, which still work; HybridModel's spec is refused",
        ),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    """A name of megatron-core that Tempo builds upon."""

    module: str
    names: tuple[str, ...]
    """Attributes of the module; a dot leads into a class."""


_CORE = "megatron.core"
HOOKS = (
    Hook(module=f"{_CORE}.activations", names=("squared_relu",)),
    Hook(module=f"{_CORE}.fusions.fused_bias_dropout", names=("get_bias_dropout_add",)),
    Hook(module=f"{_CORE}.fusions.fused_layer_norm", names=("FusedLayerNorm",)),
    Hook(module=f"{_CORE}.models.bert.bert_model", names=("BertModel",)),
    Hook(
        module=f"{_CORE}.models.gpt.gpt_model",
        names=("GPTModel._postprocess", "GPTModel.compute_language_model_loss"),
    ),
    Hook(module=f"{_CORE}.models.gpt.gpt_layer_specs", names=("get_gpt_decoder_block_spec",)),
    Hook(
        module=f"{_CORE}.models.gpt.heterogeneous.heterogeneous_layer_specs",
        names=("get_gpt_heterogeneous_layer_spec",),
    ),
    Hook(module=f"{_CORE}.models.T5.t5_model", names=("T5Model",)),
    Hook(module=f"{_CORE}.tensor_parallel", names=("ColumnParallelLinear", "get_cuda_rng_tracker")),
    Hook(
        module=f"{_CORE}.tensor_parallel.random",
        names=("CheckpointWithoutOutput", "_get_cuda_rng_state", "_set_cuda_rng_state"),
    ),
    Hook(module=f"{_CORE}.transformer.attention", names=("SelfAttention.forward",)),
    Hook(module=f"{_CORE}.transformer.dot_product_attention", names=("DotProductAttention.forward",)),
    Hook(module=f"{_CORE}.transformer.identity_op", names=("IdentityFuncOp", "IdentityOp")),
    Hook(module=f"{_CORE}.transformer.mlp", names=("MLP.forward", "MLPSubmodules")),
    Hook(module=f"{_CORE}.transformer.spec_utils", names=("ModuleSpec",)),
    Hook(module=f"{_CORE}.transformer.torch_norm", names=("WrappedTorchNorm",)),
    Hook(
        module=f"{_CORE}.transformer.transformer_block",
        names=("LayerNormImpl", "TransformerBlockSubmodules", "get_num_layers_to_build"),
    ),
    Hook(
        module=f"{_CORE}.transformer.transformer_layer",
        names=("TransformerLayerSubmodules", "get_transformer_layer_offset"),
    ),
    Hook(module=f"{_CORE}.utils", names=("get_pg_rank", "get_pg_size")),
)


def check_megatron() -> None:
    """Warn where this process's megatron-core is none that Tempo has been compared with.

    Raises ImportError naming the first of HOOKS that it lacks.
    """
    if not hasattr(megatron.core, "__version__"):
        # tempo_megatron.megatron_lm.megatron_deepspeed uses dropout_rng alone, which needs nothing newer.
        return
    first, last = Version(FIRST), Version(LAST)
    if not first.release[:2] <= VERSION.release[:2] <= last.release[:2]:
        warnings.warn(
            f"megatron-core is {VERSION}; Tempo has been compared with {FIRST} to {LAST}; it is tried all the same, so "
            "compare a few steps of your run with and without Tempo at dropout 0",
            stacklevel=2,
        )
    for hook in HOOKS:
        _check_hook(hook)


def _check_hook(hook: Hook) -> None:
    remedy = f"expected one of {FIRST} to {LAST}; install such a megatron-core, or leave Tempo off"
    try:
        module = importlib.import_module(hook.module)
    except ModuleNotFoundError as error:
        raise ImportError(f"megatron-core {VERSION} cannot import {hook.module} ({error}); {remedy}") from error
    for name in hook.names:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise ImportError(f"megatron-core {VERSION} has no {hook.module}.{name}; {remedy}")
