"""`tts-stack merge-lora`: base model + adapter -> a standard Hugging Face folder, proved equal."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from stage1_llm.base import Base, add_token_names, load_base
from stage1_llm.checkpoint import ADAPTER_FOLDER, MODEL_FOLDER
from stage1_llm.lora import (
    ADAPTER_WEIGHTS,
    BASE_FILE,
    NEW_ROWS,
    load_adapter,
    merge_lora,
    read_origin,
)
from stage1_llm.model import load_model, save_model
from stage1_llm.prompt import prompt_prefix
from stage1_llm.text import TokenizerEncoder
from tts_stack.contract import (
    CODEBOOKS_FILE,
    CONTRACT_FILE,
    VoiceContract,
    file_sha256,
    llm_sha256,
)
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.runtime import write_text

MERGED_FILE = "merged.json"  # in a merged model's folder: the adapter it was made with
# Largest difference of logits allowed, by the file's type, as a share of the largest logit.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_PROBE_SHAPE = (2, 64)
_PROBE_TEXT = "This is what the two models read."
_NUM_CONTINUED = 32  # tokens of the greedy continuation


class Behaviour(NamedTuple):
    """What a model makes of the probe."""

    logits: Tensor  # [B, L, V]
    continuation: tuple[int, ...]  # the likeliest tokens after a prompt


class MergeReport(NamedTuple):
    """How the merged, reloaded model compares with base + adapter."""

    folder: Path
    max_difference: float  # of logits
    max_logit: float
    allowed: float
    num_equal: int  # tokens of the greedy continuation until the first that differs
    num_continued: int

    def describe(self) -> str:
        """One line."""
        return (
            f"largest difference of logits {self.max_difference:.3g} (allowed {self.allowed:.3g}, "
            f"largest logit {self.max_logit:.3g}); greedy continuation equal for {self.num_equal} "
            f"of {self.num_continued} tokens"
        )


def merge_adapter(
    run: Path, *, base: str | None = None, out: Path | None = None, dtype: str = "float32"
) -> MergeReport:
    """Merge an adapter into its base model and write the result, once it is proved equal.

    Args:
        run: a run folder that holds llm/adapter, or an adapter folder.
        base: folder or hub name of the base model; None takes the one the adapter names.
        out: folder to write; None is <run>/llm/model.
        dtype: of the file, one of TOLERANCES.

    Raises:
        ConfigError: `dtype` is unknown, or `out` holds something else or must be given.
        CheckpointError: there is no adapter, it belongs to another base model, or the merged model
            does not do what base + adapter did.
    """
    if dtype not in TOLERANCES:
        raise ConfigError(f"dtype is {dtype!r}, expected one of {', '.join(TOLERANCES)}")
    adapter = find_adapter(run)
    folder = out or _default_folder(adapter)
    _check_replaceable(folder)
    loaded = load_base(base or read_origin(adapter).source)
    contract = load_adapter(adapter, loaded)
    prompt = _probe_prompt(loaded, contract)
    before = observe(loaded.model, prompt)
    merge_lora(loaded.model)

    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        _write(partial, loaded, contract, adapter, dtype)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror}); choose another folder with --out"
        ) from error
    try:
        after = observe(load_model(partial), prompt)
        report = compare(before, after, folder, TOLERANCES[dtype])
    except CheckpointError:
        shutil.rmtree(partial)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return report


def require_fresh_merge(llm: Path) -> None:
    """Refuse a merged model that is older than the adapter beside it.

    Args:
        llm: a run's folder of stage 1, with model/ and, after LoRA, adapter/.

    Raises:
        CheckpointError: the adapter was not merged yet, or was trained on since.
    """
    adapter, model = llm / ADAPTER_FOLDER, llm / MODEL_FOLDER
    if not adapter.is_dir():
        return
    found = _read_merged(model)
    if found != adapter_sha256(adapter):
        state = "was trained on since it was merged into" if found else "was not merged into"
        raise CheckpointError(f"{adapter}: {state} {model}; run tts-stack merge-lora {llm.parent}")


def adapter_sha256(adapter: Path) -> str:
    """Hash of all that an adapter folder trained.

    Raises:
        CheckpointError: a file is missing.
    """
    names = (ADAPTER_WEIGHTS, NEW_ROWS, CODEBOOKS_FILE)
    hashes = [file_sha256(adapter / n) for n in names if (adapter / n).exists()]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _read_merged(model: Path) -> str:
    try:
        values = json.loads((model / MERGED_FILE).read_text(encoding="utf-8"))
        return str(values["adapter_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def find_adapter(run: Path) -> Path:
    """The adapter folder of a run, or the folder itself.

    Raises:
        CheckpointError: there is none.
    """
    for folder in (run, run / "llm" / ADAPTER_FOLDER, run / ADAPTER_FOLDER):
        if (folder / BASE_FILE).is_file():
            return folder
    raise CheckpointError(
        f"{run}: no adapter, expected llm/{ADAPTER_FOLDER} as tts-stack train-llm writes it with "
        "+lora=..."
    )


@torch.no_grad()
def observe(model: PreTrainedModel, prompt: Tensor) -> Behaviour:
    """Logits on fixed random ids, and the greedy continuation of a prompt [1, L]."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    num_rows = len(model.get_input_embeddings().weight)
    ids = torch.randint(0, num_rows, _PROBE_SHAPE, generator=generator)
    logits = model(input_ids=ids.to(model.device)).logits.float().cpu()
    return Behaviour(logits, _continue(model, prompt.to(model.device)))


def compare(before: Behaviour, after: Behaviour, place: Path, tolerance: float) -> MergeReport:
    """Refuse a merged model that does not do what base + adapter did.

    Raises:
        CheckpointError: the logits differ by more than `tolerance` of the largest logit, or the
            merged model repeats one token where base + adapter did not.
    """
    max_logit = float(before.logits.abs().max())
    num_equal = 0
    for ours, theirs in zip(before.continuation, after.continuation, strict=True):
        if ours != theirs:
            break
        num_equal += 1
    report = MergeReport(
        place,
        float((after.logits - before.logits).abs().max()),
        max_logit,
        tolerance * max_logit,
        num_equal,
        len(before.continuation),
    )
    if not report.max_difference <= report.allowed:  # a NaN is refused too
        raise CheckpointError(
            f"{place}: the merged model is not base + adapter: {report.describe()}; nothing was "
            "written, try --dtype float32"
        )
    if _repeats(after.continuation) and not _repeats(before.continuation):
        raise CheckpointError(
            f"{place}: the merged model repeats token {after.continuation[-1]}, base + adapter "
            f"does not: {report.describe()}; nothing was written, try --dtype float32"
        )
    return report


def _continue(model: PreTrainedModel, prompt: Tensor) -> tuple[int, ...]:
    cache, step, found = DynamicCache(config=model.config), prompt, []
    for _ in range(_NUM_CONTINUED):
        # The cache by place: transformers 5 has had two names for it.
        logits = model(step, None, None, cache, use_cache=True).logits
        step = logits[:, -1:].argmax(-1)
        found.append(int(step))
    return tuple(found)


def _repeats(continuation: tuple[int, ...]) -> bool:
    """One token fills the second half."""
    return len(set(continuation[len(continuation) // 2 :])) == 1


def _probe_prompt(base: Base, contract: VoiceContract) -> Tensor:
    text_ids = TokenizerEncoder(base.tokenizer)(_PROBE_TEXT).ids
    prefix = prompt_prefix(text_ids, contract.tokens, contract.prompt)
    return torch.from_numpy(prefix.token_ids)[None]


def _write(folder: Path, base: Base, contract: VoiceContract, adapter: Path, dtype: str) -> None:
    save_model(base.model, folder, dtype=getattr(torch, dtype))
    add_token_names(base.tokenizer, contract.tokens, contract.prompt.format)
    base.tokenizer.save_pretrained(folder)
    if (adapter / CODEBOOKS_FILE).is_file():
        shutil.copy2(adapter / CODEBOOKS_FILE, folder / CODEBOOKS_FILE)
    sealed = dataclasses.replace(contract, llm_sha256=llm_sha256(folder))
    sealed.save(folder / CONTRACT_FILE)
    merged = {"adapter_sha256": adapter_sha256(adapter)}
    write_text(folder / MERGED_FILE, json.dumps(merged) + "\n")


def _default_folder(adapter: Path) -> Path:
    if adapter.resolve().name != ADAPTER_FOLDER:
        raise ConfigError(
            f"{adapter}: an adapter outside a run folder; say where the model goes with --out"
        )
    return adapter.resolve().parent / MODEL_FOLDER


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file, expected a folder; choose another with --out")
    if folder.exists() and not (folder / CONTRACT_FILE).is_file() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder}: holds something else than an LLM folder; choose another with --out"
        )
