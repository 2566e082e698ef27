"""configs/model: each file is the model of its name, down to the number of its parameters."""

from __future__ import annotations

from pathlib import Path

import megatron.core
import pytest
import torch

from tempo_megatron import TempoConfig, cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.models.build import build_model, build_transformer_config, count_parameters
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file

FOLDER = Path(__file__).parents[2] / "configs" / "model"
# Name -> parameters as published, and the share by which Megatron's modules may differ from that.
PUBLISHED = {
    "gpt2_124m": (124_439_808, 0),
    "gpt2_345m": (354_823_168, 0),
    "gpt2_774m": (774_030_080, 0),
    "gpt2_xl_1558m": (1_557_611_200, 0),
    "llama3_8b": (8_030_261_248, 0),
    "llama3.2_1b": (1_235_814_400, 0),
    "qwen3_0.6b": (596_049_920, 0),
    "qwen3_8b": (8_190_735_360, 0),
    "qwen3_30b_a3b": (30_532_122_624, 0),
    "mixtral_8x7b": (46_702_792_704, 0),
    # Less the biases that balance experts, buffers in Megatron, and the layer of multi-token prediction.
    "deepseek_v3": (671_026_419_200 - 58 * 256, 0),
    "moonlight_16b": (15_960_110_208 - 26 * 64, 0),
    "gpt_oss_20b": (20_914_757_184, 0),
    # BertForPreTraining: Megatron's pre-norm BERT has a final norm instead of one after the embedding.
    "bert_base": (110_106_428, 0),
    "bert_large": (336_226_108, 0),
    # RobertaForMaskedLM less its 2 positions of padding and its one segment, which Megatron does not have.
    "roberta_large": (355_412_057 - 3 * 1024, 0),
    # The paper's figure: Megatron's T5 has learned positions, biases and LayerNorm.
    "t5_base": (222_903_552, 0.01),
    # Names of the papers' tables.
    "gpt3_6.7b": (6.7e9, 0.01),
    "gpt3_22b": (22e9, 0.01),
    "gpt3_175b": (175e9, 0.01),
    "gpt3_530b": (530e9, 0.01),
    "gpt3_1t": (1e12, 0.01),
    "gpt2_tiny": (3_225_088 + 512 * 256, 0),
    "bert_tiny": (3_325_442 + 512 * 257, 0),
    "t5_tiny": (7_406_592 + 512 * 257, 0),
}


def count(name: str) -> int:
    """Of the real modules on the meta device, two layers of each kind: every other one is like the second."""
    values = read_shape_file(FOLDER / f"{name}.json")
    shape = make_shape(**{"vocab_size": 512, **values})
    assert shape.family == values["family"]

    def count_layers(*layers: int) -> int:
        part = shape.take_layers(layers)
        config = build_transformer_config(part, perform_initialization=False)
        with torch.device("meta"):
            return count_parameters(build_model(part, config, TempoConfig.off(), shape.vocab_size or 0))

    last = shape.num_layers - 1
    one, number = count_layers(last), shape.layers_with_experts.index(True) if shape.num_experts else 0
    of_first = count_layers(0, last) - one if number else 0
    return one + (last - number) * (count_layers(last, last) - one) + number * of_first


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_has_the_parameters_of_its_models_name(path: Path) -> None:
    cpu.use_cpu()
    expected, share = PUBLISHED[path.stem]
    with simulate_layout(1):
        assert abs(count(path.stem) - expected) <= share * expected, count(path.stem)


def test_latent_attention_that_megatron_cannot_build_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.use_cpu()
    monkeypatch.setattr(megatron.core, "__version__", "0.19.2")
    with simulate_layout(1), pytest.raises(ValueError, match="q_lora_rank .* 0.19.2; expected 0.14 to 0.18"):
        count("moonlight_16b")
