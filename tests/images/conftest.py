import pytest

from optuna_fleet.images import decoding


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
