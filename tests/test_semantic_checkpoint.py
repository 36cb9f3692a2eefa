import json

import pytest
import torch
from torch.testing import assert_close

from tts_stack.contract import file_sha256
from tts_stack.errors import CheckpointError
from tts_stack.semantic.checkpoint import load_codec, save_codec
from tts_stack.semantic.config import CodecConfig
from tts_stack.semantic.model import build_codec


@pytest.fixture
def folder(tmp_path):
    config = CodecConfig(
        id="test",
        sample_rate=8000,
        n_fft=256,
        hop_length=80,
        n_mels=20,
        frames_per_token=4,
        levels=[4, 3],
        hidden_size=8,
        ffn_size=16,
        kernel_size=3,
        num_encoder_blocks=1,
        num_decoder_blocks=1,
    )
    torch.manual_seed(0)
    save_codec(tmp_path / "codec", config, build_codec(config).state_dict())
    return tmp_path / "codec"


def edit(folder, **changes):
    path = folder / "codec.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_identity_is_the_hash_of_the_weights_file(folder):
    identity = load_codec(folder).identity
    assert identity.weights_sha256 == file_sha256(folder / "model.safetensors")
    assert (identity.id, identity.codebook_size, identity.num_codebooks) == ("test", 12, 1)


def test_two_loads_give_the_same_tokens(folder):
    clip = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    assert_close(load_codec(folder).encode([clip]), load_codec(folder).encode([clip]))


def test_missing_folder_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match=r"codec.json: no such file; a codec folder holds"):
        load_codec(tmp_path / "nowhere")


def test_missing_weights_are_reported(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: no such file; copy the whole"):
        load_codec(folder)


def test_damaged_weights_are_reported(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"SHA-256 is \w{12}, codec.json says \w{12}"):
        load_codec(folder)


def test_damaged_description_is_reported(folder):
    (folder / "codec.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"codec.json: cannot be read as JSON"):
        load_codec(folder)


def test_another_format_version_is_reported(folder):
    edit(folder, format_version=9)
    with pytest.raises(CheckpointError, match=r"format_version is 9, this release reads 1"):
        load_codec(folder)


def test_foreign_description_is_reported(folder):
    edit(folder, config={"layers": 3})
    with pytest.raises(CheckpointError, match=r"codec.json: not a codec description"):
        load_codec(folder)


def test_rates_that_contradict_the_config_are_reported(folder):
    audio = {"sample_rate": 16000, "hop_length": 80, "frames_per_token": 4}
    edit(folder, audio=audio)
    with pytest.raises(CheckpointError, match=r"does not follow from its config"):
        load_codec(folder)


def test_weights_of_another_shape_are_reported(folder):
    config = json.loads((folder / "codec.json").read_text())["config"]
    edit(folder, config={**config, "hidden_size": 16})
    with pytest.raises(CheckpointError, match=r"does not fit the model that codec.json describes"):
        load_codec(folder)
