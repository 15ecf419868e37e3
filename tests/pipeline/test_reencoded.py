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
from optuna_fleet.pipeline import images, reencoded, shards


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
    return sorted(read.folder.glob("*.shard"))


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
    first.write()
    assert torch.equal(first(path), image)
    another = Reencoded(tmp_path / "kept", min_side=32)
    assert torch.equal(another(str(path)), image)
    assert made == [path]
    assert torch.equal(Reencoded(tmp_path / "kept", min_side=32)(path.read_bytes()), image)


def test_others_see_what_is_written_while_they_read(tmp_path, path, made, monkeypatch):
    monkeypatch.setattr(shards, "LISTED_S", 0)
    ours, theirs = (Reencoded(tmp_path / "kept", min_side=32) for _ in range(2))
    with pytest.raises(FileNotFoundError):
        theirs(tmp_path / "none.jpg")
    ours(path)
    ours.write()
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
        read.write()
        assert len(files(read)) == 1


def test_a_jpeg_that_is_small_is_left_as_it_is(tmp_path, path):
    read = Reencoded(tmp_path / "kept", min_side=80)
    for _ in range(2):
        assert torch.equal(read(path), read_image(path))
        read.write()
    png = encoded(photograph(), "PNG")
    assert not torch.equal(read(png), read_image(png))
    assert read(png).shape == read_image(png).shape


@pytest.mark.parametrize("harm", ["a byte", "the end", "all", "gone"])
def test_what_is_damaged_is_made_anew(tmp_path, path, made, harm, caplog):
    read = Reencoded(tmp_path / "kept", min_side=32)
    image = read(path)
    read.write()
    (file,) = files(read)
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    damaged = {"a byte": bytes(content), "the end": bytes(content[:-20]), "all": b""}
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(damaged[harm])
    for _ in range(2):
        again = Reencoded(tmp_path / "kept", min_side=32)
        assert torch.equal(again(path), image)
        again.write()
    assert made == [path, path]
    assert ("is damaged" in caplog.text) == (harm in ("the end", "all"))


def test_budget_is_kept(tmp_path, caplog):
    read = Reencoded(tmp_path / "kept", min_side=32, max_bytes=8000)
    sources = [encoded(photograph(120, 80, seed)) for seed in range(20)]
    pictures = []
    for source in sources:
        pictures.append(read(source))
        read.write()
    assert files(read)
    assert sum(file.stat().st_size for file in files(read)) <= 8000
    assert caplog.text.count("more than 8,000 bytes") == 1
    for source, picture in zip(sources, pictures, strict=True):
        assert torch.equal(read(source), picture)


def test_a_full_disk_is_told_of_once(tmp_path, path, monkeypatch, caplog):
    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    read = Reencoded(tmp_path / "kept", min_side=32)
    image = read(path)
    for _ in range(2):
        read.write()
        assert torch.equal(read(path), image)
    assert caplog.text.count("No space left") == 1
    assert os.listdir(read.folder) == []


def test_many_files_and_equal_beginnings_of_keys(tmp_path):
    written = shards.Shards(tmp_path / "kept")
    records = {bytes([7, 7, 7, 7, n % 256]) + bytes(11): bytes([n]) * n for n in range(200)}
    for number, (key, record) in enumerate(records.items()):
        written.put(key, record)
        if number % 20 == 0:
            written.write()
    written.write()
    read = shards.Shards(tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 11
    assert all(read.get(key) == record for key, record in records.items())
    assert read.get(b"7777" + bytes(12)) is None


def test_of_a_process_that_is_killed_most_is_on_disk(tmp_path):
    written = shards.Shards(tmp_path / "kept")
    for number in range(1, 300):
        written.put(number.to_bytes(16, "little"), bytes(20_000))
        read = shards.Shards(tmp_path / "kept")
        if number % 37 == 0:
            keys = (n.to_bytes(16, "little") for n in range(1, number + 1))
            assert sum(read.get(key) is not None for key in keys) > 0.45 * number
    assert len(list((tmp_path / "kept").iterdir())) < 12


def test_what_is_put_lies_on_disk_soon(tmp_path, monkeypatch):
    written = shards.Shards(tmp_path / "kept")
    written.put(b"a" * 16, b"first")
    assert written.get(b"a" * 16) == b"first"
    assert not list((tmp_path / "kept").iterdir())
    monkeypatch.setattr(shards, "UNWRITTEN_S", -1)
    assert written.get(b"a" * 16) == b"first"
    assert shards.Shards(tmp_path / "kept").get(b"a" * 16) == b"first"


def test_a_process_leaves_what_it_made(nursery, tmp_path, path):
    """A forked one, too; what its parent has not written yet is left to the parent."""
    (tmp_path / "script.py").write_text(
        "import multiprocessing, sys\n"
        "from optuna_fleet import Reencoded\n"
        "read = Reencoded(sys.argv[1], min_side=32)\n"
        "read(sys.argv[2])\n"
        "child = multiprocessing.get_context('fork').Process(target=read, args=(sys.argv[3],))\n"
        "child.start()\n"
        "child.join()\n"
        "read.write()\n"
    )
    other = path.with_name("2.jpg")
    other.write_bytes(encoded(photograph(120, 80, seed=2)))
    nursery.run(tmp_path / "script.py", str(tmp_path / "kept"), str(path), str(other))
    read = shards.Shards(tmp_path / "kept" / "32-90")
    assert read.get(reencoded._key(path))
    assert read.get(reencoded._key(other))
    assert len(list(read._files)) == 2


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
        ({"min_side": 0}, "`min_side` is 0, but must be an integer >= 1"),
        ({"quality": 101}, "`quality` is 101, but must be an integer from 1 to 100"),
        ({"max_bytes": 1.5}, "`max_bytes` is 1.5"),
    ],
)
def test_arguments_that_can_not_work(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Reencoded(tmp_path, **arguments)
