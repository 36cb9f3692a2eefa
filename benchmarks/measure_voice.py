"""Measure a voice: word error rate by Whisper base and predicted MOS, beside its teacher's.

    python benchmarks/measure_voice.py VOICE_DIR --texts harvard.txt --lj 40 --teacher --out DIR

Writes DIR/report.json (every figure and setting), DIR/report.md (the table) and the recordings.
Needs `pip install ".[measure]"`, and ".[demo]" for --teacher.
"""

import argparse
import csv
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import soundfile
import torch
from referee import BEAM_SIZE, COMPUTE_TYPE, Judgement, Referee, wer_interval, word_error_rate
from speakers import Spoken, TeacherSpeaker, VoiceSpeaker, validation_recordings

from tts_stack.runtime import versions

ROOT = Path(__file__).resolve().parent.parent
LJ_TRANSCRIPTS = ROOT.parent / "shared" / "data" / "text" / "ljspeech_transcripts.csv"
NUM_HELD_OUT = 300  # first lines of the LJ transcripts: no model is trained on them
_PACKAGES = ("faster-whisper", "ctranslate2", "jiwer", "distillmos", "piper-tts", "soxr")


@dataclass(frozen=True)
class Measured:
    """One sentence, spoken and judged."""

    test_set: str
    system: str  # voice, teacher, copy, recording
    spoken: Spoken
    judgement: Judgement


def main() -> None:
    """Speak, judge, report."""
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    referee = Referee(args.cache, num_threads=torch.get_num_threads())
    measured = list(measure(args, referee))
    report = make_report(args, measured)
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    table = make_table(report)
    (args.out / "report.md").write_text(table, encoding="utf-8")
    print(table)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("voice", nargs="?", type=Path, help="voice or run folder; default: the shipped voice")
    add("--texts", type=Path, action="append", default=[], help="sentences, one a line; repeatable")
    add("--lj", type=int, default=0, metavar="N", help="also the first N held-out LJ transcripts")
    add("--lj-file", type=Path, default=LJ_TRANSCRIPTS, help="id|raw|normalised")
    add("--limit", type=int, help="at most this many sentences of each set")
    add("--out", type=Path, required=True, help="folder for report.json, report.md and audio")
    add("--teacher", action="store_true", help="measure the Piper teacher on the same sentences")
    add("--teacher-only", action="store_true", help="measure only the teacher")
    add("--copy-synthesis", type=Path, metavar="CORPUS", help="copy its validation recordings")
    add("--seed", type=int, default=0)
    add("--temperature", type=float, help="default: the voice's own")
    add("--top-p", type=float, help="default: the voice's own")
    add("--device", default="cpu")
    add("--cache", type=Path, default=default_cache(), help="where Whisper base is put together")
    args = parser.parse_args(argv)
    if not (args.texts or args.lj or args.copy_synthesis):
        parser.error("nothing to measure: give --texts, --lj or --copy-synthesis")
    if args.teacher_only and args.copy_synthesis:
        parser.error("--copy-synthesis needs a voice, --teacher-only measures none")
    return args


def default_cache() -> Path:
    """Folder for the joined Whisper model, under the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tts-stack" / "whisper-base"


def measure(args: argparse.Namespace, referee: Referee) -> Iterable[Measured]:
    """Every test set by every system, one sentence after the other."""
    test_sets = read_test_sets(args)
    systems: dict[str, Callable[[str], Spoken]] = {}
    if not args.teacher_only:
        voice = VoiceSpeaker(
            args.voice,
            seed=args.seed,
            temperature=args.temperature,
            top_p=args.top_p,
            device=args.device,
        )
        systems["voice"] = voice
    if args.teacher or args.teacher_only:
        systems["teacher"] = TeacherSpeaker()
    for test_set, texts in test_sets.items():
        for system, speak in systems.items():
            spoken = (speak(text) for text in texts)
            yield from judge_all(args.out, referee, test_set, system, spoken)
    if args.copy_synthesis:
        recordings = list(validation_recordings(args.copy_synthesis, args.limit))
        copies = (voice.copy(item.text, item.audio) for item in recordings)
        yield from judge_all(args.out, referee, "validation", "copy", copies)
        yield from judge_all(args.out, referee, "validation", "recording", recordings)


def read_test_sets(args: argparse.Namespace) -> dict[str, list[str]]:
    """Sentences by name of their set."""
    test_sets = {}
    for path in args.texts:
        lines = path.read_text(encoding="utf-8").splitlines()
        test_sets[path.stem] = [line.strip() for line in lines if line.strip()][: args.limit]
    if args.lj:
        test_sets["lj_held_out"] = read_held_out(args.lj_file, args.lj)[: args.limit]
    return test_sets


def read_held_out(path: Path, count: int) -> list[str]:
    """The first `count` normalised LJ transcripts, whole lines, from the held-out ones."""
    if count > NUM_HELD_OUT:
        raise SystemExit(f"--lj {count}: only the first {NUM_HELD_OUT} lines are held out")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE))
    return [row[-1] for row in rows[:count]]


def judge_all(
    out_dir: Path, referee: Referee, test_set: str, system: str, spoken: Iterable[Spoken]
) -> Iterable[Measured]:
    """Write each recording, judge it and say so on standard error."""
    folder = out_dir / test_set / system
    folder.mkdir(parents=True, exist_ok=True)
    for index, item in enumerate(spoken):
        soundfile.write(folder / f"{index:03d}.wav", item.audio, item.sample_rate)
        judgement = referee.judge(item.audio, item.sample_rate, item.text)
        line = f"{test_set} {system} {index:03d}: {judgement.errors}/{judgement.words} errors"
        print(f"{line}, MOS {judgement.mos:.2f}: {judgement.hypothesis}", file=sys.stderr)
        yield Measured(test_set, system, item, judgement)


def make_report(args: argparse.Namespace, measured: Sequence[Measured]) -> dict[str, object]:
    """Everything a reader needs to repeat and to judge the figures."""
    groups = dict.fromkeys((item.test_set, item.system) for item in measured)
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {name: _plain(item) for name, item in vars(args).items() if name != "cache"},
        "referee": {
            "wer": f"Whisper base, faster-whisper, {COMPUTE_TYPE}, beam {BEAM_SIZE}, temperature 0",
            "normaliser": "transformers EnglishTextNormalizer on both sides, no spelling table",
            "mos": "distillmos",
        },
        "hardware": hardware(),
        "versions": {**versions(), **_installed(_PACKAGES)},
        "results": [
            {"test_set": test_set, "system": system, **summarize(measured, test_set, system)}
            for test_set, system in groups
        ],
        "sentences": [
            {
                "test_set": item.test_set,
                "system": item.system,
                "text": item.spoken.text,
                "audio_s": round(item.spoken.seconds, 3),
                "compute_s": round(item.spoken.compute_s, 3),
                "warnings": item.spoken.warnings,
                **dataclasses.asdict(item.judgement),
            }
            for item in measured
        ],
    }


def summarize(measured: Sequence[Measured], test_set: str, system: str) -> dict[str, object]:
    """Figures of one system on one test set."""
    chosen = [item for item in measured if (item.test_set, item.system) == (test_set, system)]
    judgements = [item.judgement for item in chosen]
    audio_s = sum(item.spoken.seconds for item in chosen)
    compute_s = sum(item.spoken.compute_s for item in chosen)
    return {
        "wer": round(word_error_rate(judgements), 4),
        "wer_95": [round(value, 4) for value in wer_interval(judgements)],
        "sentences": len(chosen),
        "words": sum(item.words for item in judgements),
        "substitutions": sum(item.substitutions for item in judgements),
        "deletions": sum(item.deletions for item in judgements),
        "insertions": sum(item.insertions for item in judgements),
        "mos": round(statistics.mean(item.mos for item in judgements), 3),
        "mos_median": round(statistics.median(item.mos for item in judgements), 3),
        "audio_s": round(audio_s, 2),
        "compute_s": round(compute_s, 2),
        "real_time_factor": round(compute_s / audio_s, 3),
        "with_warnings": sum(bool(item.spoken.warnings) for item in chosen),
    }


def make_table(report: dict[str, object]) -> str:
    """The results as a Markdown table, with what they were measured on."""
    rows = ["| set | system | sentences | words | WER | 95 % | MOS | real-time factor |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    results = report["results"]
    assert isinstance(results, list)
    for row in results:
        low, high = row["wer_95"]
        rows.append(
            f"| {row['test_set']} | {row['system']} | {row['sentences']} | {row['words']} "
            f"| {row['wer']:.3f} | {low:.3f}-{high:.3f} | {row['mos']:.2f} "
            f"| {row['real_time_factor']:.3f} |"
        )
    facts = report["hardware"]
    assert isinstance(facts, dict)
    rows += ["", f"{facts['cpu']}, {facts['torch_threads']} thread(s); `{report['command']}`", ""]
    return "\n".join(rows)


def hardware() -> dict[str, object]:
    """What the figures of speed depend on."""
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _installed(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _plain(value: object) -> object:
    """A setting as JSON; paths relative to the checkout, so that a report names no machine."""
    if isinstance(value, Path):
        return os.path.relpath(value, ROOT) if value.is_absolute() else str(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
