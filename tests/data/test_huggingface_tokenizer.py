"""A tokenizer.json as it is: the ids of transformers for byte-level and metaspace tokenizers, and data of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tempo_megatron.data import DataError, corpus
from tempo_megatron.data.dataset_files import load_dataset_tokenizer
from tempo_megatron.data.prepare_data import main
from tempo_megatron.data.tokenizer import HuggingFaceTokenizer

END = "<|end_of_text|>"
TEXTS = ["def keep(value):\n    return value;\n\n", "12345 naïve  words, <|end_of_text|> as text", "", "漢字\t\r\n x"]
# Llama 3's: punctuation takes the line breaks that follow it, and a number has at most three digits.
LLAMA_3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


def save_tokenizer(folder: Path, kind: str) -> Path:
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "llama 2", unk_token=None))
    if kind == "llama 3":
        split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    names = [END, *(f"<0x{byte:02X}>" for byte in range(256) if kind == "llama 2")]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama 3", "llama 2"])
def test_the_ids_are_those_of_transformers_and_the_data_says_so(kind: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", kind)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = HuggingFaceTokenizer(str(folder / "tokenizer.json"), str(folder / "tokenizer_config.json"))
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text
        assert ours.eod not in ours.tokenize(text)
    assert ours.eod == theirs.eos_token_id and ours.vocab_size == len(theirs)
    assert ours.detokenize(ours.tokenize(TEXTS[0])) == theirs.decode(theirs.encode(TEXTS[0]))

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    prefix = str(tmp_path / "data")
    argv = ["--input", str(texts), "--output-prefix", prefix, "--tokenizer-type", "HuggingFaceTokenizer"]
    assert main([*argv, "--tokenizer-model", str(folder), "--workers", "1"]) == 0
    found = [document.tolist() for document in IndexedDataset(prefix)]
    assert found == [[*ours.tokenize(text), ours.eod] for text in TEXTS if text]
    assert load_dataset_tokenizer(prefix).unique_identifiers == ours.unique_identifiers


def test_a_text_is_not_cut_where_its_tokens_would_change(tmp_path: Path) -> None:
    """Llama 3 makes one token of a semicolon and the line break behind it, where GPT-2's rule cuts."""
    folder = save_tokenizer(tmp_path / "model", "llama 3")
    ours = HuggingFaceTokenizer(str(folder / "tokenizer.json"), str(folder / "tokenizer_config.json"))
    long = TEXTS[0] * 40_000
    assert len(ours.tokenize(long)) == 40_000 * len(ours.tokenize(TEXTS[0]))
    (tmp_path / "long.txt").write_text(long, encoding="utf-8")
    files = corpus.list_files([str(tmp_path / "long.txt")], (), str(tmp_path / "out"), corpus.LeftOut())
    assert len(corpus.cut_pieces(files)) > 1
    assert len(corpus.cut_pieces(files, cuts_texts=ours.cuts_texts)) == 1


BROKEN = {
    "not a tokenizer": ("tokenizer.json", "{}", "is not a tokenizer.json"),
    "no end": ("tokenizer_config.json", "{}", 'has no "eos_token", which ends every document'),
    "another end": ("tokenizer_config.json", '{"eos_token": {"content": "</s>"}}', "names the eos_token '</s>'"),
    "not JSON": ("tokenizer_config.json", "{", "is not JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_sentence(name: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, "llama 3")
    file, content, sentence = BROKEN[name]
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=sentence):
        HuggingFaceTokenizer(str(folder / "tokenizer.json"), str(folder / "tokenizer_config.json"))
