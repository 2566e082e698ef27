"""RunConfig: everything that is decided about a run before it starts, in one object that is only read afterwards.

Each field says what its argument is, what it is without one, and what a resumed run does with it; to add an option, add
a field. `arguments.parse_arguments` reads the command line. `arguments.complete_run` adds what follows from the
DeepSpeed JSON, the checkpoint, the number of processes and the defaults. `checks.check_run` refuses what cannot train.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.arguments import LEDGER
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import FrozenDict
from tempo_megatron.training.run.option import (
    COMPUTED,
    MAY_CHANGE,
    OF_EACH_START,
    SCHEDULE,
    STAYS,
    Option,
    list_options,
    option,
)
from tempo_megatron.words.argument_types import (
    parse_fault_timeout,
    parse_folder,
    parse_fraction,
    parse_mask_prob,
    parse_minutes,
    parse_not_negative,
    parse_not_negative_float,
    parse_png,
    parse_positive,
    parse_positive_float,
    parse_probability,
    parse_seed,
    parse_steps,
    parse_workers,
)
from tempo_megatron.words.pipeline_layout import parse_pipeline_layout

Blend = tuple[tuple[str, ...], tuple[float, ...] | None]
"""Prefixes of data sets, and their weights if there are several."""
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")

_training = functools.partial(option, group="training")
_of_adamw = "optimizer: AdamW; parameters with one dimension and biases do not decay"
_optimizer = functools.partial(option, group=_of_adamw, on_load=MAY_CHANGE)
_schedule = functools.partial(_optimizer, on_load=SCHEDULE)
_data = functools.partial(option, group="data", on_load=MAY_CHANGE)
_recompute = functools.partial(option, group="recomputation and fusion", on_load=MAY_CHANGE)
_output = functools.partial(option, group="output", on_load=OF_EACH_START)
_folder = functools.partial(_output, parse=parse_folder, metavar="DIR")
_layout = functools.partial(option, group="distributed", on_load=OF_EACH_START)
_masking = functools.partial(option, on_load=STAYS, group="masking")
_mask_prob = functools.partial(_masking, "share of the tokens to predict", parse_mask_prob, default=0.15)
_short_seq_prob = functools.partial(
    _masking, "share of the samples that are made shorter, 0 for none as in RoBERTa", parse_probability, default=0.1
)
_YES_OR_NO: Any = {"action": argparse.BooleanOptionalAction}
_SWITCH: Any = {"action": "store_true", "default": False}


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The global batch sizes of a run's training steps."""

    full: int
    """That of --global-batch-size."""
    ramp: tuple[int, int, int] | None
    """The first size, what is added at a time, and the samples until the full size; None if every step is full."""

    def find(self, consumed_samples: int) -> int:
        """Returns the size of the step that begins after so many samples.

        This is the rule of RampupBatchsizeNumMicroBatchesCalculator in megatron.core.num_microbatches_calculator, its
        float64 quotients included, so that a run has the same steps as under Megatron-LM.
        """
        if self.ramp is None or consumed_samples > self.ramp[2]:
            return self.full
        start, increment, samples = self.ramp
        per_increment = samples / ((self.full - start) // increment)
        return start + increment * int(consumed_samples / per_increment)

    def count_samples(self, steps: int) -> int:
        """Returns the samples of the first `steps` steps of the run."""
        samples = 0
        for done in range(steps):
            size = self.find(samples)
            if size == self.full:  # so are all the steps that follow
                return samples + (steps - done) * size
            samples += size
        return samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """Of a BERT."""

    mask_prob: float = _mask_prob()
    short_seq_prob: float = _short_seq_prob()
    masking: str = _masking(
        "words: whole words, up to three in a row, as Megatron-LM masks for BERT; tokens: single ones, as in RoBERTa",
        default="words",
        choices=("words", "tokens"),
        switches={
            "bert-no-binary-head": "no segments and no prediction of their order, as in RoBERTa (default: as --model "
            "says, else with both)"
        },
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanMasking:
    """Of a T5: what Megatron-LM calls vocab_extra_ids are its sentinels."""

    mask_prob: float = _mask_prob()
    short_seq_prob: float = _short_seq_prob()
    vocab_extra_ids: int = _masking(
        "sentinels for spans to fill in; their ids follow the vocabulary's", parse_positive, default=100
    )


MASKINGS: dict[str, type[Masking | SpanMasking]] = {"bert": Masking, "t5": SpanMasking}
"""Of each family that has one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    model: ModelShape = option("the model; its vocab_size is as given (task.Vocabulary has the rows)", on_load=STAYS)
    vocab_padding_tp: int = option(
        "tensor parallel size that the vocabulary is padded for: that of the first start", on_load=STAYS
    )

    micro_batch_size: int = _training(
        "samples per device and forward pass",
        parse_positive,
        on_load=MAY_CHANGE,
        in_json="train_micro_batch_size_per_gpu",
    )
    global_batch_size: int = _training(
        "samples per step over all devices (default micro batch x data parallel size x the JSON's accumulation)",
        parse_positive,
        on_load=STAYS,
        in_json="train_batch_size",
    )
    num_micro_batches: int = option(
        "micro batches of one rank in a step of the full global batch size",
        on_load=COMPUTED,
        in_json="gradient_accumulation_steps",
    )
    rampup_batch_size: tuple[int, int, int] | None = _training(
        "begin with START samples a step and add INCREMENT at a time, up to --global-batch-size after SAMPLES samples",
        parse_positive,
        on_load=STAYS,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
    )
    train_iters: int = _training(
        "steps of the whole run; needed without --load",
        parse_positive,
        on_load=MAY_CHANGE,
    )
    exit_interval: int | None = _training(
        "save and exit at every multiple of this step", parse_positive, on_load=OF_EACH_START
    )
    exit_signal_handler: bool = _training(
        "on SIGTERM or Ctrl-C, to the launcher or a rank, finish the step, save and exit; on a second Ctrl-C exit at "
        "once; on SIGUSR1 to a rank finish the step, save and go on",
        on_load=OF_EACH_START,
        default=True,
        **_YES_OR_NO,
    )
    eval_only: bool = _training(
        "only compute the losses of --load's checkpoint on the validation part and, with --test-iters, the test part",
        on_load=OF_EACH_START,
        needs="load",
        **_SWITCH,
    )
    seed: int = _training("of weights, dropout and the order of the samples", parse_seed, on_load=STAYS, default=1234)
    precision: str = _training(
        "fp32, bf16 or fp16",
        on_load=STAYS,
        names=(),
        switches={
            "bf16": "bfloat16 (the DeepSpeed JSON must not say otherwise)",
            "fp16": "float16 (the DeepSpeed JSON must not say otherwise)",
        },
    )

    lr: float = _schedule("highest learning rate; needed without --load", parse_positive_float)
    min_lr: float = _schedule("lowest after warm-up", parse_not_negative_float, default=0.0)
    lr_warmup_iters: int = _schedule("steps of linear warm-up", parse_not_negative, default=0)
    lr_decay_style: str = _schedule(
        "curve of the learning rate after warm-up",
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int = _schedule("steps until --min-lr (default --train-iters)", parse_positive)
    lr_wsd_decay_iters: int | None = _schedule(
        "last steps, in which a WSD schedule (warm-up, stable, decay) goes down to --min-lr",
        parse_positive,
        needs="lr_decay_style=WSD",
    )
    lr_wsd_decay_style: str | None = _schedule(
        f"curve of that decay (default {WSD_DECAY_STYLES[0]})", choices=WSD_DECAY_STYLES, needs="lr_decay_style=WSD"
    )
    weight_decay: float = _optimizer("of AdamW", parse_not_negative_float, default=0.01)
    adam_beta1: float = _optimizer("decay of the gradient's mean", parse_fraction, default=0.9)
    adam_beta2: float = _optimizer("decay of the squared gradient's mean", parse_fraction, default=0.999)
    adam_eps: float = _optimizer("added to the denominator", parse_positive_float, default=1e-8)
    clip_grad: float = _optimizer(
        "highest global gradient norm; 0 is no clipping (default the JSON's gradient_clipping, else 1)",
        parse_not_negative_float,
        default=1.0,
        in_json="gradient_clipping",
    )
    override_opt_param_scheduler: bool = _optimizer(
        "on --load take the learning rate schedule from the arguments and their defaults, not from the checkpoint",
        on_load=OF_EACH_START,
        needs="load",
        **_SWITCH,
    )

    data_path: tuple[str, ...] = _data(
        "prefix of a .bin/.idx pair, or several as WEIGHT PREFIX WEIGHT PREFIX ...; needed without --load",
        nargs="+",
        metavar="PREFIX",
    )
    blend: Blend = option("prefixes and weights of --data-path", on_load=COMPUTED)
    split: str = _data("train,validation,test weights", on_load=STAYS, default="969,30,1")
    split_weights: tuple[float, float, float] = option("the three shares of --split", on_load=COMPUTED)
    data_cache_path: str | None = _data(
        "folder for the sample indices (default: beside the data)", parse_folder, on_load=OF_EACH_START
    )
    vocab_file: str | None = _data(
        "GPT-2's vocab.json, or the vocab.txt or vocab.json of a BERT or T5 (default: the tokenizer stored with the "
        "data)",
    )
    merge_file: str | None = _data("merges.txt of a byte-level BPE")
    eod_mask_loss: bool = _data(
        "no loss where the input is end-of-document (default no)",
        default=False,
        family="gpt",
        **_YES_OR_NO,
    )
    masking: Masking | SpanMasking | None = option(
        "how a BERT or T5 masks tokens; GPT has none", on_load=STAYS, group="masking", names=()
    )
    num_workers: int = _data(
        "loader processes (default 2 with a GPU, else 0)", parse_workers, on_load=OF_EACH_START, metavar="N"
    )
    eval_interval: int = _data("steps between validations", parse_positive, default=1000)
    eval_iters: int = _data("global batches per validation; 0 is none", parse_not_negative, default=100)
    test_iters: int = _data(
        "global batches of --split's third part, for a loss at the end", parse_not_negative, default=0
    )
    sample_parts: tuple[int, ...] = option(
        "parts of the order of the samples (see datasets.build_datasets); none in a new run", on_load=STAYS
    )

    recompute_granularity: str | None = _recompute(
        "which activations to recompute (default none)",
        choices=("full", "selective", "none"),
        switches={"recompute-activations": "short for --recompute-granularity selective"},
    )
    recompute_method: str | None = _recompute(
        "for full recomputation", choices=("uniform", "block"), needs="recompute_granularity=full"
    )
    recompute_num_layers: int | None = _recompute(
        "for full recomputation", parse_positive, needs="recompute_granularity=full"
    )
    recompute_modules: tuple[str, ...] | None = _recompute(
        "for selective recomputation: core_attn and mlp (default core_attn)",
        nargs="+",
        choices=("core_attn", "mlp"),
        needs="recompute_granularity=selective",
    )
    bias_gelu_fusion: bool = _recompute(
        "fused tanh GELU, or erf GELU, unfused (default: as in the checkpoint, else fused on a GPU)",
        **_YES_OR_NO,
    )
    bias_swiglu_fusion: bool = _recompute("fused SwiGLU on a GPU", default=True, **_YES_OR_NO)
    bias_dropout_fusion: bool = _recompute("fused bias, dropout and residual on a GPU", default=True, **_YES_OR_NO)
    masked_softmax_fusion: bool = _recompute(
        "fused softmax of the attention scores on a GPU with Apex", default=True, **_YES_OR_NO
    )

    save: str | None = _folder("where checkpoints go; every node must see the same folder")
    load: str | None = _folder(
        "continue from the latest checkpoint in this folder, of any layout (tensor and pipeline parallel size, number "
        "of processes, ZeRO stage), stock or Tempo. Options left out are as in the checkpoint, but for layout and "
        "output; model, data, --global-batch-size, --rampup-batch-size and --seed stay (docs/checkpoints.md)",
    )
    pretrained_checkpoint: str | None = _folder(
        "begin with only the model and weights of the latest checkpoint in this folder, of `tempo-megatron import` or "
        "a run of any layout. With a checkpoint in --load the run goes on from that",
    )
    save_interval: int | None = _output(
        "steps between checkpoints (default: only at the end)", parse_positive, needs="save"
    )
    async_save: bool = _output(
        "copy the state to the host's memory, which has to hold it, and write it during training",
        needs="save",
        **_SWITCH,
    )
    keep_checkpoints: int | None = _output(
        "newest checkpoints that stay in --save (default: all of them)", parse_positive, needs="save"
    )
    log_interval: int = _output("steps per log line", parse_positive, default=10)
    log_params_norm: bool = _output(
        "log the L2 norm of the model's parameters, over all ranks, in each log line", **_SWITCH
    )
    tensorboard_dir: str | None = _folder("write TensorBoard events there")
    metrics_file: str | None = _output(
        "one JSON line per step (default DIR of --save)", metavar="JSONL", in_save="metrics.jsonl"
    )
    loss_plot: str | None = _output(
        "loss curve drawn at the end (default DIR of --save)",
        parse_png,
        metavar="PNG",
        needs="metrics_file",
        in_save="loss.png",
    )
    tempo_ledger: str | None = _output(**LEDGER)
    log_dir: str | None = _folder(
        "where each rank of a failed run writes rank_NNNNN.log, its traceback or where it was (default logs in DIR of "
        "--save)",
        in_save="logs",
    )
    profile: tuple[int, int] | None = _output(
        "record these steps: a trace for Perfetto and, on a GPU, a snapshot for torch's memory viewer",
        parse_steps,
        metavar="FIRST-LAST",
        needs="profile_dir",
    )
    profile_ranks: tuple[int, ...] = _output("that record", parse_not_negative, default=(0,), nargs="+", metavar="RANK")
    profile_dir: str | None = _folder("where they write (default profile in DIR of --save)", in_save="profile")

    world_size: int = option("processes of the run", on_load=OF_EACH_START)
    data_parallel_size: int = option("processes over tensor and pipeline parallel size", on_load=OF_EACH_START)
    tensor_model_parallel_size: int = _layout("ranks that share each layer", parse_positive, default=1)
    pipeline_model_parallel_size: int = _layout(
        "stages that the layers are divided over, with ZeRO 0 or 1", parse_positive, default=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = _layout(
        "interleave: each stage has several chunks of this many layers (default: one chunk)", parse_positive
    )
    pipeline_model_parallel_layout: str | None = _layout(
        "which layers each stage or chunk has, as Et*3|t*5L: E the embedding, t a layer, L the loss, | between",
        metavar="LAYOUT",
    )
    sequence_parallel: bool = _layout("also split norms and dropout over the tensor parallel ranks", **_SWITCH)
    use_cpu_initialization: bool = _layout("draw the weights on the CPU: same for any TP", **_SWITCH)
    distributed_timeout_minutes: int = _layout(
        "how long ranks wait for one another, at the start and in a collective, until the run ends",
        parse_minutes,
        default=10,
    )
    fault_timeout: float = _layout(
        "how long a rank may be stopped (a busy one is not) or its host silent until the run ends; 0 watches nothing "
        "(default 60)",
        parse_fault_timeout,
        default=60.0,
        metavar="SECONDS",
    )
    on_gpu: bool = option("whether the processes have GPUs", on_load=OF_EACH_START)
    deepspeed_config: str = _layout(
        "the DeepSpeed configuration",
        names=("--deepspeed_config", "--deepspeed-config"),
        metavar="JSON",
        required=True,
    )
    deepspeed: FrozenDict = option(
        'content of that file, with a value for each "auto" that the trainer decides',
        on_load=OF_EACH_START,
    )

    tempo: TempoConfig = option(
        'what each operation keeps, as given; Job replaces each "auto" by a value',
        on_load=MAY_CHANGE,
    )
    memory_budget: int | None = option(
        'bytes per rank for which Job plans each "auto"; none plans nothing',
        on_load=MAY_CHANGE,
        group="tempo",
        names=(),
    )
    host_memory: int = option(
        "bytes of a host that the plan may use for all its ranks; 0 offloads nothing",
        on_load=MAY_CHANGE,
        group="tempo",
        names=(),
    )
    tempo_arguments: str = option("Tempo's arguments as given, for the banner", on_load=OF_EACH_START)

    @property
    def batch_sizes(self) -> BatchSizes:
        """The samples of each training step; validation always has `global_batch_size`."""
        return BatchSizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def layers_of_chunks(self) -> tuple[int, ...] | None:
        """Layers of each chunk of the pipeline, in the order of the model, if a layout says them; else None.

        Raises ValueError if it is not of this model.
        """
        layout, stages = self.pipeline_model_parallel_layout, self.pipeline_model_parallel_size
        if layout is None:
            return None
        return tuple(chunk.count("t") for chunk in parse_pipeline_layout(layout, self.model.num_layers, stages))

    @property
    def num_chunks(self) -> int:
        """Chunks of the model on each pipeline stage, of a run that was checked; 1 without interleaving."""
        if self.layers_of_chunks is not None:
            return len(self.layers_of_chunks) // self.pipeline_model_parallel_size
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        return 1 if per_chunk is None else self.model.num_layers // (self.pipeline_model_parallel_size * per_chunk)


OPTIONS: dict[str, Option] = list_options(RunConfig)
"""The options of a run by their fields' names."""
