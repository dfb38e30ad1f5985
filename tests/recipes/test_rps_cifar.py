import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ragtag.recipes.tasks.cifar import decode


def _image(value: int, side: int = 32, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(buffer, kind)
    return buffer.getvalue()


def _archive(path: Path, members: dict[str, bytes], mode: str = "w:xz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


GOOD = {
    "train/cat/0001.png": _image(10),
    "train/dog/0001.png": _image(20),
    "train/dog/0002.png": _image(30),
    "test/dog/0001.png": _image(40),
    "README.txt": b"not an image",
}


def test_an_archive_becomes_arrays_with_labels_in_alphabetical_order(tmp_path) -> None:
    decode(_archive(tmp_path / "a.tar.xz", GOOD), tmp_path / "out")
    read = {
        name: np.load(tmp_path / f"out/{name}.npy", allow_pickle=False)
        for name in ("train_x", "train_y", "test_x", "test_y")
    }
    assert read["train_x"].shape == (3, 32, 32, 3) and read["train_x"][:, 0, 0, 0].tolist() == [10, 20, 30]
    assert read["train_y"].tolist() == [0, 1, 1] and read["test_y"].tolist() == [1]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("../train/cat/0002.png", _image(1), "points out of the archive"),
        ("/train/cat/0002.png", _image(1), "points out of the archive"),
        ("train/cat/0002.png", b"no image at all", "is not an image"),
        ("train/cat/0002.png", _image(1)[:60], "is not an image"),
        ("train/cat/0002.png", _image(1, side=33), "33 x 33; expected 32 x 32"),
        ("train/cat/0002.png", b"\0" * ((1 << 20) + 1), "too much"),
        ("test/cow/0001.png", _image(1), "'cow' in test/ is not in train/"),
    ],
    ids=["parent", "absolute", "text", "cut", "size", "bytes", "class"],
)
def test_what_is_wrong_in_an_archive_is_said(tmp_path, name: str, data: bytes, message: str) -> None:
    archive = _archive(tmp_path / "a.tar", {**GOOD, name: data}, "w")
    with pytest.raises(ValueError, match=message):
        decode(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_are_not_followed(tmp_path) -> None:
    (tmp_path / "secret.png").write_bytes(_image(99))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in GOOD.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("train/cat/0003.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.png")
        tar.addfile(link)
    decode(tmp_path / "a.tar", tmp_path / "out")
    assert 99 not in np.load(tmp_path / "out/train_x.npy", allow_pickle=False)


def test_what_is_no_such_archive_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        decode(tmp_path / "none.tar", tmp_path / "out")
    (tmp_path / "text.tar").write_text("hello" * 1000)
    with pytest.raises(ValueError, match="not a whole tar archive"):
        decode(tmp_path / "text.tar", tmp_path / "out")
    whole = _archive(tmp_path / "b.tar.xz", GOOD).read_bytes()
    (tmp_path / "cut.tar.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole tar archive"):
        decode(tmp_path / "cut.tar.xz", tmp_path / "out")
    with pytest.raises(ValueError, match="expected train/CLASS"):
        decode(_archive(tmp_path / "e.tar", {"x.txt": b"x"}, "w"), tmp_path / "out")
