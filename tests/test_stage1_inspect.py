import shutil

import pytest
import typer
from base_models import contract_for, load_grown, write_tiny_base
from stage1_support import TOKENS, make_contract, tiny_network
from typer.testing import CliRunner

import stage1_llm.base as base_module
from stage1_llm.checkpoint import save_llm
from stage1_llm.inspection import id_ranges, inspect_target
from stage1_llm.lora import apply_lora, save_adapter
from stage1_llm.lora_config import LoraSettings
from stage1_llm.merge import merge_adapter
from stage1_llm.vocab import Extras, build_token_map, grow_token_map
from tts_stack.commands import llm
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.voice import default_voice_dir

EXTRAS = Extras(has_mask=True, max_run=5, speakers=("ann", "bob"), languages=("en",))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"), "qwen2")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A run folder with an adapter for the chat format."""
    folder = tmp_path_factory.mktemp("run")
    loaded, tokens = load_grown(base, "chat")
    lora = LoraSettings(r=4, alpha=8, dropout=0.0, embeddings=True)
    model = apply_lora(loaded.model, lora, tokens)
    contract = contract_for(loaded, tokens, "chat")
    save_adapter(model, folder / "llm" / "adapter", contract, loaded, lora)
    return folder


def facts(inspection):
    return dict(inspection.facts)


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        build_token_map("abc", 7, EXTRAS),
        grow_token_map(300, 20, pad=3, num_rows=310),
        grow_token_map(300, 20, EXTRAS, pad=3, num_rows=5000),
        grow_token_map(125, 128, pad=0, num_rows=0),  # no padding row
    ],
)
def test_every_id_is_in_exactly_one_range(tokens):
    ranges = id_ranges(tokens, "tagged")
    assert [i for part in ranges for i in range(part.first, part.last + 1)] == list(
        range(tokens.vocab_size)
    )


def test_ranges_name_what_they_hold():
    named = {
        (part.kind, part.names): (part.first, part.last)
        for part in id_ranges(grow_token_map(300, 20, EXTRAS, pad=3, num_rows=310), "chat")
    }
    assert named == {
        ("text", "of the base model's tokenizer; padding is 3"): (0, 299),
        ("special", "<|text_to_semantic|>"): (300, 300),
        ("special", "<|sound_start|>"): (301, 301),
        ("special", "<|sound_end|>"): (302, 302),
        ("special", "<|sound_mask|>"): (303, 303),
        ("tags", "<|speaker:ann|> .. <|language:en|>"): (304, 306),
        ("durations", "<|duration_02|> .. <|duration_05|>"): (307, 310),
        ("semantic", "<|sound_0000|> .. <|sound_0019|>"): (311, 330),
        ("padding rows", ""): (331, 383),
    }


def test_the_shipped_voice_is_shown_with_its_phonemes():
    found = inspect_target(str(default_voice_dir()))
    assert facts(found)["voice"] == "joe"
    assert facts(found)["model"] == "LlamaForCausalLM, 6 layers, 256 wide"
    assert facts(found)["embeddings"].startswith("tied")
    names = [step.name for step in found.example]
    assert names[0] == "[TEXT]"
    assert names[1:4] == ["h", "ɛ", "l"]
    assert names[-5:] == ["[START]", *(f"<|sound_000{i}|>" for i in range(3)), "[STOP]"]
    assert [step.group for step in found.example[-5:]] == ["text", *["audio"] * 3, "end"]


def test_an_llm_folder_from_scratch_counts_its_parameters(tmp_path):
    network = tiny_network(tie_embeddings=False)
    save_llm(network, make_contract(), tmp_path)
    found = inspect_target(str(tmp_path), text="abc")
    total = sum(parameter.numel() for parameter in network.parameters())
    embeddings = 2 * TOKENS.vocab_size * 32
    expected = f"{total / 1e6:.2f} M, {embeddings / 1e6:.2f} M of them embeddings"
    assert facts(found)["parameters"] == expected
    assert facts(found)["embeddings"] == "untied"


def test_a_base_model_is_shown_as_it_would_be_grown(base):
    found = inspect_target(str(base), codebook_size=10, prompt_format="chat", text="Hello")
    assert facts(found)["rows of the base model"] == "346"
    assert facts(found)["embedding rows"] == "384 = 3 x 128"
    names = [step.name for step in found.example]
    assert names[:2] == ["<|im_start|>", "s"]
    task = names.index("<|text_to_semantic|>")
    assert "".join(names[task + 1 :]) == (
        "Hello<|im_end|>\n<|im_start|>assistant\n"
        "<|sound_start|><|sound_0000|><|sound_0001|><|sound_0002|><|sound_end|>"
    )


def test_a_base_model_needs_the_size_of_the_codebook(base):
    with pytest.raises(
        ConfigError, match="no semantic tokens yet; say how many .* --codebook-size"
    ):
        inspect_target(str(base))


def test_a_base_model_on_the_hub_is_shown_without_its_weights(base, monkeypatch):
    wanted = []

    def download(name, local_files_only=False, allow_patterns=(), **settings):
        wanted.append(allow_patterns)
        if local_files_only:
            raise OSError("not cached")
        return str(base)

    monkeypatch.setattr(base_module, "snapshot_download", download)
    assert inspect_target("some/model", codebook_size=10).title.startswith("some/model")
    assert "*.safetensors" not in wanted[-1]


def test_a_run_with_an_adapter_names_base_and_settings(run, base):
    found = inspect_target(str(run))
    assert found.title.startswith("adapter")
    assert facts(found)["base model"].startswith(str(base.resolve()))
    assert facts(found)["LoRA"] == "r 4, alpha 8, on embeddings and all-linear"
    assert facts(found)["model"].startswith("Qwen2ForCausalLM, 2 layers")
    assert "<|text_to_semantic|>" in [step.name for step in found.example]


def test_an_adapter_is_shown_even_where_its_base_is_gone(run, tmp_path, base):
    copy = shutil.copytree(run / "llm" / "adapter", tmp_path / "adapter")
    origin = (copy / "base.json").read_text()
    (copy / "base.json").write_text(origin.replace(str(base.resolve()), "/gone"))
    loaded, _ = load_grown(base, "chat")
    loaded.tokenizer.save_pretrained(copy)
    assert facts(inspect_target(str(copy)))["model"] == "the base model is not at hand"


def test_a_merged_model_is_shown_before_the_adapter(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    merge_adapter(copy)
    found = inspect_target(str(copy))
    assert found.title == f"LLM {copy / 'llm' / 'model'}"
    assert found.ids == inspect_target(str(run)).ids
    assert found.example == inspect_target(str(run)).example


def test_what_is_none_of_these_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_target(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inspect_target(str(tmp_path))


def test_the_command_prints_map_and_example_to_standard_output(base):
    app = typer.Typer()
    llm.register(app)
    arguments = ["inspect", str(base), "--codebook-size", "10", "--format", "chat"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "<|sound_0000|> .. <|sound_0009|>" in result.stdout
    assert "[START]" not in result.stdout
    shown = CliRunner().invoke(app, ["inspect", str(base), "--codebook-size", "10"])
    assert "[START]" in shown.stdout  # no markup
