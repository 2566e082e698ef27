"""The tokenizers of masked language models, and the list of all that data sets are made with, by Megatron-LM's names.

Those of masked language models are BERT's WordPiece and RoBERTa's byte-level BPE, which has a name of our own. They
have four tokens that never come from a text: they begin a sample, end a segment, replace a masked token, and pad a
sample. Their data need no end-of-document token, because Megatron's masked dataset never reads past a document's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tempo_megatron.data import DataError
from tempo_megatron.data.tokenizer import ByteLevelTokenizer, GPT2Tokenizer, HuggingFaceTokenizer, TextTokenizer

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's from Python 3.11 on

_LONGEST_WORD = 100  # BERT's own limit: a longer word is [UNK]
_LARGEST_ALPHABET = 1000
_FIRST_PRIVATE = 0xF0000
_BYTE_LEVEL_WHITE_SPACE = frozenset(chr(256 + byte) for byte in b" \t\n\r\x0b\x0c")


class WordPieceTokenizer(TextTokenizer):
    """BERT's WordPiece over a vocab.txt, one token per line.

    A word with a character that the vocabulary lacks, or of more than 100 characters, is [UNK].
    """

    lowercase: ClassVar[bool]
    suffixes = ("-vocab.txt",)
    smallest_size = 128, "an alphabet and the special tokens"
    special_tokens: ClassVar[Mapping[str, str]] = {
        "pad": "[PAD]",
        "unk": "[UNK]",
        "cls": "[CLS]",
        "sep": "[SEP]",
        "mask": "[MASK]",
    }

    def _build(self, files: Sequence[str], contents: Sequence[bytes]) -> Tokenizer:
        (vocab_file,) = files
        try:
            tokens = [line.rstrip("\r") for line in contents[0].decode("utf-8").removesuffix("\n").split("\n")]
        except UnicodeDecodeError as error:
            raise DataError(f"{vocab_file} is not UTF-8 text; --vocab-file takes BERT's vocab.txt") from error
        vocab = {token: number for number, token in enumerate(tokens)}
        if len(vocab) < len(tokens):
            ((twice, _),) = Counter(tokens).most_common(1)
            raise DataError(f"{vocab_file} has the token {twice!r} twice; --vocab-file takes BERT's vocab.txt")
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, folder: str) -> Self:
        """Trains a vocabulary and writes it to folder/vocab.txt: the special tokens first, [PAD] is 0."""
        normalizer = normalizers.BertNormalizer(lowercase=cls.lowercase)
        splitter = pre_tokenizers.BertPreTokenizer()
        words: Counter[str] = Counter()
        for text in texts:
            words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
        pieces = _learn_pieces(words, vocab_size - len(cls.special_tokens))
        vocab_file = str(Path(folder, "vocab.txt"))
        Path(vocab_file).write_text(
            "".join(f"{token}\n" for token in [*cls.special_tokens.values(), *pieces]), encoding="utf-8"
        )
        return cls(vocab_file)

    def starts_word(self, token_id: int) -> bool:
        """Whether a word begins with the token."""
        return not self.inv_vocab[token_id].startswith("##")


class LowerCaseWordPieceTokenizer(WordPieceTokenizer):
    """The tokenizer of uncased models: letters become small and lose their accents."""

    lowercase, default_size = True, 30522


class CasedWordPieceTokenizer(WordPieceTokenizer):
    """The tokenizer of cased models."""

    lowercase, default_size = False, 28996


class RobertaTokenizer(ByteLevelTokenizer):
    """RoBERTa's tokenizer: GPT-2's byte-level BPE with four special tokens."""

    default_size, smallest_size = 50265, (260, "256 bytes and four")
    special_tokens: ClassVar[Mapping[str, str]] = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "mask": "<mask>"}

    def starts_word(self, token_id: int) -> bool:
        """Whether the token begins with white space. A word also begins a text, but no token shows that."""
        return self.inv_vocab[token_id][0] in _BYTE_LEVEL_WHITE_SPACE


def _learn_pieces(words: Counter[str], num_pieces: int) -> list[str]:
    """Learns the pieces of a WordPiece vocabulary: single characters first, then what BPE merges, best first.

    The library's own WordPiece trainer numbers the characters inside words in the order of a hash table, which differs
    between processes. Here BPE learns from an alphabet in which a character at a word's beginning and the same one
    inside a word are two private characters, so that the words alone decide the order.
    """
    letters: Counter[str] = Counter()
    for word, count in words.items():
        letters.update({letter: word.count(letter) * count for letter in word})
    largest = min(_LARGEST_ALPHABET, num_pieces // 4)
    alphabet = sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:largest])
    first = {letter: chr(_FIRST_PRIVATE + 2 * number) for number, letter in enumerate(alphabet)}
    inner = {letter: chr(_FIRST_PRIVATE + 2 * number + 1) for number, letter in enumerate(alphabet)}
    original = {sign: letter for letter, sign in first.items()} | {sign: letter for letter, sign in inner.items()}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=num_pieces, min_frequency=2, initial_alphabet=sorted(original), show_progress=False
    )
    usable = [
        (first[word[0]] + "".join(inner[letter] for letter in word[1:]), count)
        for word, count in sorted(words.items())
        if len(word) <= _LONGEST_WORD and first.keys() >= set(word)
    ]
    tokenizer.train_from_iterator((f"{word} " * count for word, count in usable), trainer)
    vocab, is_inner = tokenizer.get_vocab(), set(inner.values())
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    return [("##" if piece[0] in is_inner else "") + "".join(original[sign] for sign in piece) for piece in pieces]


GPT2_BPE = "GPT2BPETokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
TYPES: dict[str, Any] = {
    GPT2_BPE: GPT2Tokenizer,
    "BertWordPieceLowerCase": LowerCaseWordPieceTokenizer,
    "BertWordPieceCase": CasedWordPieceTokenizer,
    "RobertaBPETokenizer": RobertaTokenizer,
    HUGGING_FACE: HuggingFaceTokenizer,
}
MASKED_TYPES: tuple[str, ...] = ("BertWordPieceLowerCase", "BertWordPieceCase", "RobertaBPETokenizer")


def list_given_files(name: str, vocab_file: str | None, merge_file: str | None) -> tuple[str, ...]:
    """Returns the files of a tokenizer of type `name` that the user named: none of them, or all.

    Raises: DataError (a ValueError) if one is missing, or if one is named that the type does not have.
    """
    if len(TYPES[name].suffixes) == 1 and merge_file is not None:
        raise DataError(f"--merge-file is given, but a {name} has only a vocabulary; leave it out")
    if len(TYPES[name].suffixes) == 2 and (vocab_file is None) != (merge_file is None):
        given, missing = ("--vocab-file", "--merge-file") if vocab_file else ("--merge-file", "--vocab-file")
        raise DataError(f"{given} is given without {missing}; a tokenizer needs both files")
    return tuple(path for path in (vocab_file, merge_file) if path is not None)
