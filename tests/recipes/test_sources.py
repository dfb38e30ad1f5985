"""What ``--data`` may be."""

from __future__ import annotations

import tarfile

import pytest

from ragtag.recipes.tasks.sources import sources


def test_data_is_an_archive_a_text_or_a_folder_of_both(tmp_path) -> None:
    archive, text = tmp_path / "images.tar.xz", tmp_path / "words.txt"
    with tarfile.open(archive, "w:xz"):
        pass
    text.write_text("to be or not to be")
    assert sources(None) == (None, None)
    assert sources(archive) == (archive, None)
    assert sources(text) == (None, text)
    assert sources(tmp_path) == (archive, text)


def test_an_archive_is_one_by_its_name_or_by_what_is_in_it(tmp_path) -> None:
    damaged, other = tmp_path / "images.tgz", tmp_path / "images.bin"
    damaged.write_bytes(b"cut off")
    with tarfile.open(other, "w"):
        pass
    assert sources(damaged) == (damaged, None)
    assert sources(other) == (other, None)


def test_other_data_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="tar archive of images, a text, or a folder"):
        sources(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"0 tar archives and 0 \.txt files"):
        sources(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a text")
    with pytest.raises(ValueError, match=r"2 \.txt files"):
        sources(tmp_path)
