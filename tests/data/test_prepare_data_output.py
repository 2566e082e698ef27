"""Whose files those at the place of the output are: only what prepare_data made is replaced or removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tempo_megatron.data.dataset_files import load_dataset_tokenizer
from tempo_megatron.data.dataset_writer import DatasetWriter, PartialOutput
from tempo_megatron.data.prepare_data import main


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", "-vocab.json", "-merges.txt"])
def test_an_output_of_others_is_replaced_only_where_that_is_asked_for(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, theirs = write(tmp_path / "a.txt", "text"), write(tmp_path / f"out{suffix}", "theirs")
    command = ["--input", str(text), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"{theirs} exists and was not made by prepare_data" in error and "--overwrite" in error
    assert theirs.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir() if path != text] == [theirs.name]
    assert main([*command, "--overwrite"]) == 0
    assert main(command) == 0  # by now they are its own


def test_data_of_megatron_under_the_name_of_a_prepared_data_set_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write(tmp_path / "a.txt", "text")
    command = ["--input", str(text), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main(command) == 0
    with DatasetWriter(str(tmp_path / "out.bin"), np.uint16) as writer:
        writer.add(np.arange(99, dtype=np.uint16), [99], [True])
        writer.finish(str(tmp_path / "out.idx"))
    assert main(command) == 1
    assert "out.bin exists and was not made by prepare_data" in capsys.readouterr().err


def test_a_file_that_appears_while_the_data_are_prepared_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write(tmp_path / "a.txt", "text")
    finish = DatasetWriter.finish

    def finish_late(writer: DatasetWriter, path: str) -> None:
        write(tmp_path / "out.bin", "theirs")
        finish(writer, path)

    monkeypatch.setattr(DatasetWriter, "finish", finish_late)
    assert main(["--input", str(text), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]) == 1
    assert "out.bin exists and was not made by prepare_data" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.bin"]
    assert (tmp_path / "out.bin").read_text() == "theirs"


@pytest.mark.parametrize("names", [["bin"], ["notes.txt"], ["prepare_data.lock", "notes.txt"], ["sub/bin"]])
def test_a_folder_of_others_is_left_alone(names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write(tmp_path / "a.txt", "text")
    for name in names:
        path = tmp_path / "out.partial" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, "theirs")
    command = ["--input", str(text), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    for more in ([], ["--overwrite"], ["--skip-existing"]):
        assert main([*command, *more]) == 1
        error = capsys.readouterr().err
        assert "was not made by prepare_data, which needs that folder" in error and error.count("\n") == 1
    assert all((tmp_path / "out.partial" / name).read_text() == "theirs" for name in names)
    assert not list(tmp_path.glob("out[.-][!p]*"))


def test_a_file_put_into_the_folder_meanwhile_stays(tmp_path: Path) -> None:
    with PartialOutput(str(tmp_path / "out")) as output:
        write(Path(output.locate(".bin")), "ours")
        write(Path(output.folder, "notes.txt"), "theirs")
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "theirs"
    assert not (tmp_path / "out.partial" / "bin").exists()


def test_a_given_tokenizer_under_the_name_of_a_trained_one_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write(tmp_path / "a.txt", "text")
    command = ["--input", str(text), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--vocab-size", "300"]) == 0
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"out{suffix}").unlink()
    files = ["--vocab-file", str(tmp_path / "out-vocab.json"), "--merge-file", str(tmp_path / "out-merges.txt")]
    assert main([*command, *files]) == 0
    assert load_dataset_tokenizer(str(tmp_path / "out")).vocab_size > 256
    capsys.readouterr()
    assert main(command) == 1
    assert "out-vocab.json exists and was not made by prepare_data" in capsys.readouterr().err
    assert main([*command, *files]) == 0
