"""Smaller copies of photographs on disk: the same pixels whoever made them, nothing lost."""

import os
import pickle

import pytest
import torch
from test_images import encoded, photograph
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional

import optuna_fleet
from optuna_fleet import Reencoded, read_image
from optuna_fleet.pipeline import images, reencoded


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data" / "class" / "1.jpg"
    path.parent.mkdir(parents=True)
    path.write_bytes(encoded(photograph(120, 80)))
    return path


@pytest.fixture
def made(monkeypatch):
    """The sources that were decoded whole."""
    names = []
    read = reencoded.content
    monkeypatch.setattr(reencoded, "content", lambda source: names.append(source) or read(source))
    return names


@pytest.fixture(params=["simplejpeg", "pillow"])
def codec(request, monkeypatch):
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(images, "_simplejpeg", lambda: None)


def files(read):
    return sorted(read.folder.glob("*/*"))


@pytest.mark.usefixtures("codec")
def test_smaller_and_much_like_the_original(tmp_path, path):
    small = Reencoded(tmp_path / "kept", min_side=32, quality=95)(path)
    wanted = functional.resize(read_image(path), [32], antialias=True)
    assert small.dtype is torch.uint8
    assert small.shape == wanted.shape == (3, 32, 48)
    assert (small.float() - wanted.float()).abs().mean() < 6


def test_the_same_pixels_before_and_after_they_are_kept(tmp_path, path, made):
    first = Reencoded(tmp_path / "kept", min_side=32)
    image = first(path)
    assert torch.equal(first(path), image)
    assert torch.equal(first(path), image)
    another = Reencoded(tmp_path / "kept", min_side=32)
    assert torch.equal(another(str(path)), image)
    assert made == [path]
    assert torch.equal(Reencoded(tmp_path / "kept", min_side=32)(path.read_bytes()), image)


def test_others_see_what_is_kept_while_they_read(tmp_path, path, made):
    ours, theirs = (Reencoded(tmp_path / "kept", min_side=32) for _ in range(2))
    with pytest.raises(FileNotFoundError):
        theirs(tmp_path / "none.jpg")
    ours(path)
    theirs(path)
    assert made == [path]


def test_a_file_that_is_replaced_is_read_anew(tmp_path, path):
    read = Reencoded(tmp_path / "kept", min_side=32)
    before = read(path)
    path.write_bytes(encoded(photograph(120, 80, seed=1)))
    os.utime(path, ns=(1, 1))
    assert not torch.equal(read(path), before)


def test_parameters_have_folders_of_their_own(tmp_path, path):
    for side in (32, 40):
        read = Reencoded(tmp_path / "kept", min_side=side)
        assert min(read(path).shape[1:]) == side
        assert len(files(read)) == 1


def test_a_jpeg_that_is_small_is_left_as_it_is(tmp_path, path):
    read = Reencoded(tmp_path / "kept", min_side=80)
    for _ in range(2):
        assert torch.equal(read(path), read_image(path))
    png = encoded(photograph(), "PNG")
    assert not torch.equal(read(png), read_image(png))
    assert read(png).shape == read_image(png).shape


@pytest.mark.parametrize("harm", ["a byte", "the end", "all", "zeros", "gone"])
def test_what_is_damaged_is_made_anew(tmp_path, path, made, harm):
    read = Reencoded(tmp_path / "kept", min_side=32)
    image = read(path)
    (file,) = files(read)
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    damaged = {"a byte": bytes(content), "the end": bytes(content[:-20]), "all": b""}
    damaged["zeros"] = bytes(4)
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(damaged[harm])
    for _ in range(2):
        again = Reencoded(tmp_path / "kept", min_side=32)
        assert torch.equal(again(path), image)
    assert made == [path, path]


def test_a_full_disk_is_told_of_once(tmp_path, path, monkeypatch, caplog):
    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    read = Reencoded(tmp_path / "kept", min_side=32)
    image = read(path)
    for _ in range(2):
        assert torch.equal(read(path), image)
    assert caplog.text.count("No space left") == 1
    assert files(read) == []


def test_as_loader_of_an_image_folder(tmp_path, path):
    read = Reencoded(tmp_path / "kept", min_side=32)
    image, label = ImageFolder(str(path.parents[1]), loader=read)[0]
    assert label == 0
    copied = pickle.loads(pickle.dumps(read))
    assert torch.equal(copied(path), image)
    assert optuna_fleet.Reencoded is reencoded.Reencoded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_side": 0}, "`min_side` is 0, but must be a whole number >= 1"),
        ({"folder": None}, "`folder` is None, but must be the path of a folder"),
        ({"folder": ""}, "`folder` is '', but must be the path of a folder"),
        ({"quality": 101}, "`quality` is 101, but must be a whole number >= 1 and <= 100"),
    ],
)
def test_arguments_that_can_not_work(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Reencoded(**{"folder": tmp_path, **arguments})
