"""One rank that builds models of a Megatron-DeepSpeed checkout, stock and then with Tempo, and writes what they gave.

    python megatron_deepspeed_child.py REQUEST.json RESULT.pt

A process of its own: the checkout's `megatron` and the installed one exclude each other. REQUEST holds `arguments`
(Megatron-DeepSpeed's), `tempo` (a "tempo" block), `pipe` (GPTModelPipe instead of GPTModel), `is_launched` (as the
launcher does it, by arguments) and `sides` ("stock", which comes first, and "tempo"). The one answer of torch.cuda that
a CPU has to give is `current_device`, for buffers; DeepSpeed's CPU accelerator gives the rest.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SAMPLES, TOKENS, VOCABULARY = 4, 32, 128


def main(request: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    import torch
    from megatron.arguments import core_transformer_config_from_args, parse_args, validate_args
    from megatron.core import mpu, tensor_parallel
    from megatron.core.enums import ModelType
    from megatron.global_vars import _build_num_microbatches_calculator, set_args

    from tempo_megatron import TempoConfig
    from tempo_megatron.megatron_lm.megatron_deepspeed import patch_scripts, use_tempo

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=f"file://{os.environ['STORE']}", **ranks)
    sys.argv = ["pretrain_gpt.py", *request["arguments"]]
    report = f"{os.environ['STORE']}.json"
    if request["is_launched"]:
        from tempo_megatron.megatron_lm.options import add_tempo_options, read_options

        tempo_config, *_ = read_options(request["arguments"])
        patch_scripts(tempo_config, report, add_tempo_options)
    args = parse_args()
    validate_args(args)
    args.padded_vocab_size, args.model_type = VOCABULARY, ModelType.encoder_or_decoder
    args.consumed_train_samples = 40
    set_args(args)
    _build_num_microbatches_calculator(args)
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        sequence_parallel_size=args.ds_sequence_parallel_size,
    )
    found: dict[str, Any] = {}
    for name in request["sides"]:
        if name == "tempo" and not request["is_launched"]:
            chosen, reasons = use_tempo(args, TempoConfig.from_dict(request["tempo"]))
            found["chosen"], found["reasons"] = chosen.describe(), reasons
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        config = core_transformer_config_from_args(args)
        found[name] = _run_step(_build(args, config, request), args, request)
    if request["is_launched"]:
        found["report"] = json.loads(Path(report).read_text(encoding="utf-8"))
    return found


def _build(args: Any, config: Any, request: dict[str, Any]) -> Any:
    import torch
    from megatron.core import mpu
    from megatron.model import GPTModel, GPTModelPipe
    from megatron.model.language_model import Embedding

    if request.get("pipe"):
        model = GPTModelPipe(config, num_tokentypes=0, parallel_output=True)
    else:
        model = GPTModel(config, num_tokentypes=0, parallel_output=True, pre_process=True, post_process=True)
    # The same weights whatever the layout: a rank takes its rows or columns of what is drawn for the whole model.
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        shape = list(parameter.shape)
        is_split = getattr(parameter, "tensor_model_parallel", False)
        if is_split:
            shape[parameter.partition_dim] *= size
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 0.1
        # A rank's rows of query_key_value are its queries, then its keys, then its values.
        blocks = whole.chunk(3) if "query_key_value" in name else [whole]
        if is_split:
            blocks = [block.chunk(size, parameter.partition_dim)[rank] for block in blocks]
        parameter.data.copy_(torch.cat(tuple(blocks)))
    for module in model.modules():
        if isinstance(module, Embedding):
            module.embedding_dropout.p = 0.0  # drawn by torch, differently in each layout
    return model.to(args.params_dtype)


def _run_step(model: Any, args: Any, request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from megatron.core import mpu

    from tempo_megatron.memory.tape.scopes import Scopes

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1), generator=generator)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(TOKENS).expand(SAMPLES, TOKENS)
    mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    args.attn_mask = mask
    model.train()
    losses = []
    step = args.micro_batch_size
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    kept = 0
    for first in range(dp_rank * step, SAMPLES, dp_size * step):
        rows = slice(first, first + step)
        batch = tokens[rows], positions[rows], mask
        scopes = Scopes(model)
        with scopes.follow():
            if request.get("pipe"):
                logits = model((batch[0], batch[1], mask))
                logits = logits[0] if isinstance(logits, tuple) else logits
                loss = torch.nn.functional.cross_entropy(
                    logits.transpose(0, 1).reshape(-1, VOCABULARY).float(), labels[rows].reshape(-1), reduction="none"
                ).view(-1, TOKENS)
            else:
                out = model(*batch, labels=labels[rows])
                loss = out[0] if isinstance(out, tuple) else out
        kept = sum(storage.num_bytes for storage in scopes.list_saved([loss]))
        loss.float().mean().backward()
        losses.append(loss.detach().float())
    return {
        "losses": losses,
        "kept": kept,
        "keys": sorted(model.state_dict()),
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result_path = sys.argv[2]
    result = main(given)
    import torch

    torch.save(result, result_path)
    os._exit(0)  # gloo's threads of three groups take seconds to leave
