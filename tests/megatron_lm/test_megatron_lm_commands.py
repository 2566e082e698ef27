"""The commands that documents tell people to type, typed; and scripts that are not Megatron-LM's own."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import megatron.core
import pytest
from covering import exhaustive
from distributed import run_megatron_ranks, run_ranks
from packaging.version import Version
from training_job import free_port

from tempo_megatron.cli import main

ROOT = Path(__file__).parents[2]
# What of megatron.training the launcher takes hold of.
_TRAINING = {
    "arguments": "def add_megatron_arguments(parser):\n    return parser\n",
    "global_vars": "def get_args():\n    assert False, 'args is not initialized.'\n",
}


def make_training(folder: Path) -> None:
    (folder / "megatron" / "training").mkdir(parents=True)
    for name, text in _TRAINING.items():
        (folder / "megatron" / "training" / f"{name}.py").write_text(text)


def make_checkout(folder: Path, script: str) -> Path:
    """A checkout whose Megatron-core is the one that is installed, with this script as pretrain_gpt.py."""
    make_training(folder)
    (folder / "megatron" / "core").mkdir()
    installed = Path(megatron.core.__file__)
    lines = [f"__path__.append({str(installed.parent)!r})", f"exec(open({str(installed)!r}).read())"]
    (folder / "megatron" / "core" / "__init__.py").write_text("\n".join(lines))
    path = folder / "pretrain_gpt.py"
    path.write_text(script)
    return path


_SAY = """
import argparse, os, sys
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import arguments

args = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
is_replaced = hasattr(GPTModel.__init__, "__wrapped__")
print("said", os.environ["RANK"], __name__, args.use_tempo, args.local_rank, os.environ["WORLD_SIZE"], is_replaced)
sys.exit(0)
"""
_SRUN = """#!/bin/sh
export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1
export SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=1
exec "$@"
"""


def list_commands() -> dict[str, str]:
    """Launcher -> its command with Tempo in docs/megatron.md."""
    text = (ROOT / "docs" / "megatron.md").read_text("utf-8")
    found = re.findall(r"^((\w+) .* run pretrain_gpt\.py \.\.\. --use-tempo)(?: +#.*)?$", text, re.MULTILINE)
    return {launcher: command for command, launcher in found}


def test_the_document_has_a_command_for_each_launcher() -> None:
    assert list(list_commands()) == ["torchrun", "deepspeed", "srun"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", *exhaustive(["deepspeed"], ["srun"])])
def test_the_documented_command_works_from_the_checkouts_folder(tmp_path: Path, launcher: str) -> None:
    make_checkout(tmp_path, _SAY)
    command = list_commands()[launcher].replace(" ...", "").replace("--nproc_per_node 8", "--nproc_per_node 1")
    (tmp_path / "srun").write_text(_SRUN)
    (tmp_path / "srun").chmod(0o755)
    paths = [str(Path(sys.executable).parent), str(tmp_path), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONWARNINGS"] = "ignore"
    words = shlex.split(command)
    if launcher != "srun":  # tests of other processes listen too
        words[1:1] = ["--master_port", str(free_port())]
    if launcher == "deepspeed":  # on a CPU it starts a process for each socket
        words[1:1] = ["--num_gpus", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    local_rank = 0 if launcher == "deepspeed" else None
    assert f"said 0 __main__ True {local_rank} 1 True\n" in done.stdout


_LOOP = """
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

sizes = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "attention_dropout": 0.0}
config = TransformerConfig(**sizes, use_cpu_initialization=True, masked_softmax_fusion=False)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=100, max_sequence_length=16)
print("built")
tokens = torch.arange(32).view(2, 16)
for _ in range(2):
    model(tokens, tokens % 16, None, labels=tokens).mean().backward()
print("trained", model.embedding.word_embeddings.weight.grad.norm().isfinite().item())
"""


def run_script(text: str, folder: Path, *arguments: str) -> tuple[int | str, str, str]:
    """Status, or traceback, and what was printed on stdout and stderr, of `tempo-megatron run` and a script of one's
    own under an installed megatron.training: without a checkout, without Megatron's arguments and its schedules.

    arguments: of the script, or with SCRIPT in its place.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # nobody launched it
        del os.environ[name]
    make_training(folder / "site")
    sys.path.append(str(folder / "site"))
    script = folder / "script.py"
    script.write_text(text)
    status: int | str
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            words = arguments if "SCRIPT" in arguments else ("SCRIPT", *arguments)
            status = main(["run", *(str(script) if word == "SCRIPT" else word for word in words)])
        except SystemExit as end:
            status = str(end.code)
        except Exception:
            status = traceback.format_exc()
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("error", ["BrokenPipeError", *exhaustive(["ValueError"])])
def test_what_a_script_raises_ends_in_its_own_traceback(tmp_path: Path, error: str) -> None:
    text = f'def work():\n    raise {error}("the script\'s own")\n\nwork()\n'
    ((told, _, complaints),) = run_ranks(run_script, 1, text, tmp_path)
    assert f'File "{tmp_path}/script.py", line 2, in work' in told and complaints == ""
    assert told.splitlines()[-1] == f"{error}: the script's own"


_OF_STOCK = """
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
config = TransformerConfig(**sizes, use_cpu_initialization=True)
T5Model(config, config, encoder_model_with_local_spec(), decoder_model_with_local_spec(), 100, 16)
"""
_OF_A_USER = _LOOP.replace(
    "import torch\n",
    """import torch
from megatron.core.transformer import mlp

def refuse(*args, **kwargs):
    raise ValueError("this MLP is mine")

mlp.MLP.__init__ = refuse
""",
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_OF_STOCK, "ValueError: Group query attention is not currently supported in cross attention."),
        (_OF_A_USER, "ValueError: this MLP is mine"),
    ],
)
def test_what_others_refuse_in_building_the_model_ends_in_its_own_traceback(
    tmp_path: Path, text: str, cause: str
) -> None:
    ((told, _, complaints),) = run_megatron_ranks(run_script, 1, 1, text, tmp_path, "--use-tempo")
    assert told.startswith("Traceback") and told.splitlines()[-1].startswith(cause)
    assert "--use-tempo:" not in complaints


def test_latent_attention_that_this_megatron_cannot_build_is_refused(tmp_path: Path) -> None:
    latent = "v_head_dim=3, qk_head_dim=2, qk_pos_emb_head_dim=2, kv_lora_rank=4, q_lora_rank=4, "
    text = _LOOP.replace("TransformerConfig", "MLATransformerConfig").replace("**sizes, ", f"**sizes, {latent}")
    spec = "get_gpt_layer_local_spec(multi_latent_attention=True)"
    text = text.replace("get_gpt_layer_local_spec()", spec).replace("=16)", '=16, position_embedding_type="none")')
    ((status, _, complaints),) = run_megatron_ranks(run_script, 1, 1, text, tmp_path, "--use-tempo")
    if Version(megatron.core.__version__).release[:2] != (0, 16):
        assert status == 0
        return
    assert status == 2
    assert "--use-tempo: multi_latent_attention is on and Transformer Engine is not installed" in complaints


_PARSERS = {
    "argparse": "p = argparse.ArgumentParser()",
    "a subclass": "class P(argparse.ArgumentParser):\n    def error(self, what):\n        sys.exit(4)\np = P()",
    "raising": "class P(argparse.ArgumentParser):\n    def error(self, m):\n        raise KeyError(m)\np = P()",
}


_HINT = (
    "tempo-megatron run: script.py has a parser of its own that does not know Tempo's arguments; expected them before "
    "the script; write tempo-megatron run --use-tempo script.py ..."
)


def write_strict(parser: str) -> str:
    return f"import argparse, sys\n{_PARSERS[parser]}\np.add_argument('--lr')\nprint(p.parse_args().lr)\n"


@pytest.mark.parametrize("parser", ["argparse", "raising", *exhaustive(["a subclass"])])
def test_a_script_whose_own_parser_is_strict_is_told_where_tempos_arguments_go(tmp_path: Path, parser: str) -> None:
    ((status, _, complaints),) = run_ranks(run_script, 1, write_strict(parser), tmp_path, "--lr", "1", "--use-tempo")
    assert status != 0 and _HINT in complaints


def test_a_word_that_tempo_does_not_know_either_has_no_hint(tmp_path: Path) -> None:
    words = ("--use-tempo", "SCRIPT", "--tempo-nrom", "off")
    ((status, _, complaints),) = run_ranks(run_script, 1, write_strict("argparse"), tmp_path, *words)
    assert status == "2" and _HINT not in complaints


def test_tempos_arguments_before_a_script_are_not_the_scripts(tmp_path: Path) -> None:
    script, words = write_strict("argparse") + _LOOP, ("--use-tempo", "SCRIPT", "--lr", "1")
    ((status, printed, _),) = run_megatron_ranks(run_script, 1, 1, script, tmp_path, *words)
    assert status == 0 and printed.startswith("1\n") and "slots replaced" in printed


def test_a_loop_of_ones_own_has_a_banner_and_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = (_LOOP, tmp_path, "--use-tempo", "--tempo-report", str(report))
    ((status, printed, _),) = run_megatron_ranks(run_script, 1, 1, *arguments)
    lines = printed.splitlines()
    assert status == 0 and lines[0] == "built" and lines[-1] == "trained True"
    banner = "\n".join(lines[1:-1])
    assert "slots replaced: activation 2 of 2, norm 5 of 5, dropout 0 of 5, attention 2 of 2, loss 1 of 1" in banner
    assert banner.count("tempo: GPTModel, ") == 1
    # Nobody says which samples a mask would be drawn for.
    assert "Megatron's arguments, which say what samples a mask is drawn for, are not" in banner
    (model,) = json.loads(report.read_text("utf-8"))["models"]
    assert model["slots"]["norm"] == {"tempo": 5, "all": 5} and set(model["reasons"]) == {"dropout"}
    assert model["tempo"]["dropout"] == "off" and model["tempo"]["attention"] == "flash"


def test_use_tempo_that_had_nothing_to_replace_is_said_at_the_scripts_end(tmp_path: Path) -> None:
    ((status, _, complaints),) = run_ranks(run_script, 1, "import megatron.core", tmp_path, "--use-tempo")
    (line,) = complaints.splitlines()
    assert status == 0
    assert line.startswith("tempo-megatron run: --use-tempo is given, but this script builds no GPTModel, BertModel,")
