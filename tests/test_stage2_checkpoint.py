import pytest
import torch
from stage2_support import HIDDEN_SIZE, SPEC, TINY
from torch.testing import assert_close

from stage2_vocoder.checkpoint import VocoderIdentity, load_vocoder, save_vocoder
from stage2_vocoder.model import build_vocoder
from tts_stack.errors import CheckpointError

IDENTITY = VocoderIdentity(TINY, SPEC, HIDDEN_SIZE, "llm", "reconstruction")


@pytest.fixture
def vocoder():
    torch.manual_seed(0)
    return build_vocoder(TINY, hidden_size=HIDDEN_SIZE, audio=SPEC).eval()


@pytest.fixture
def folder(tmp_path, vocoder):
    save_vocoder(tmp_path, IDENTITY, vocoder.state_dict())
    return tmp_path


@torch.no_grad()
def test_a_saved_vocoder_sounds_the_same_up_to_float16(folder, vocoder):
    hidden_states = torch.randn(1, HIDDEN_SIZE, 6)
    loaded = load_vocoder(folder)
    assert not loaded.training
    assert_close(loaded(hidden_states), vocoder(hidden_states), atol=2e-3, rtol=1e-2)


def test_an_empty_folder_holds_no_vocoder(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json in it, so it holds no finished"):
        load_vocoder(tmp_path)


def test_a_missing_or_damaged_weights_file_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable"):
        load_vocoder(folder)


def test_weights_of_another_size_are_refused(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"dim": 8', '"dim": 16'))
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not fit config\.json"):
        load_vocoder(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format_version": 1', '"format_version": 9', "format_version is 9, this release reads 1"),
        ('"hidden_size"', '"hiden_size"', "not a vocoder's configuration"),
        ("{", "[", "not a vocoder's configuration"),
    ],
)
def test_a_damaged_configuration_is_named(folder, old, new, message):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        load_vocoder(folder)
